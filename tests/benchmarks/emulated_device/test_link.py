"""Copies over an emulated link take as long as on the real one, beside a step, and a step waits for no more."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from autopar.hardware.hosts import HostLink
from autopar.ops.host_copies import copies_by, copy_from_host, copy_to_host, wait_copy
from benchmarks.emulated_device.link import EmulatedLink, covered

CPU = torch.device("cpu")
LINK = HostLink(
    name="link",
    latency_seconds=1e-3,
    to_host_bytes_per_second=100e6,
    from_host_bytes_per_second=200e6,
    both_bytes_per_second=150e6,
)
MB = torch.ones(250_000)
"""10 ms to the host, 5 ms from it; twice that while both directions are busy."""


def test_a_copy_takes_the_latency_and_its_bytes_over_the_rate_of_its_direction() -> None:
    with EmulatedLink(LINK) as link, copies_by("cpu", link):
        for _ in range(3):
            parked = wait_copy(copy_to_host(MB), MB)
            assert torch.equal(wait_copy(copy_from_host(parked, CPU), parked), MB)
    out, back = ([c.seconds for c in link.copies if c.direction == way] for way in ("to_host", "from_host"))
    assert min(out) >= 11e-3
    assert min(back) >= 6e-3
    assert statistics.median(out) < 16e-3
    assert link.bytes_copied("to_host") == 3e6


def test_a_device_that_shares_its_link_gets_its_part() -> None:
    with EmulatedLink(LINK, sharing=2) as link, copies_by("cpu", link):
        wait_copy(copy_to_host(MB), MB)
    assert link.copies[0].seconds >= 21e-3


def test_both_directions_at_once_are_slower_than_one() -> None:
    with EmulatedLink(LINK) as link, copies_by("cpu", link):
        out, back = copy_to_host(MB), copy_from_host(torch.cat([MB, MB]), CPU)
        wait_copy(out, MB)
        wait_copy(back, MB)
    assert min(copy.seconds for copy in link.copies) >= 17e-3


def test_copies_of_one_direction_run_one_after_the_other_and_those_of_two_beside_each_other() -> None:
    with EmulatedLink(LINK) as link, copies_by("cpu", link):
        started = [copy_to_host(MB), copy_to_host(MB), copy_from_host(MB, CPU)]
        for copied in started:
            wait_copy(copied, MB)
    first, second = (copy for copy in link.copies if copy.direction == "to_host")
    back = next(copy for copy in link.copies if copy.direction == "from_host")
    assert first.ended <= second.began
    assert back.began < first.ended


def test_what_runs_beside_a_copy_hides_it() -> None:
    with EmulatedLink(LINK) as link, copies_by("cpu", link):
        parked = copy_to_host(MB)
        time.sleep(30e-3)
        wait_copy(parked, MB)
    assert link.overlap > 0.9
    assert link.stall_seconds < 3e-3
    with EmulatedLink(LINK) as waiting, copies_by("cpu", waiting):
        wait_copy(copy_to_host(MB), MB)
    assert waiting.overlap < 0.2
    assert waiting.stall_seconds > 9e-3


def test_a_copy_that_fails_fails_the_step_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the link is down")

    with EmulatedLink(LINK) as link, copies_by("cpu", link):
        monkeypatch.setattr(link, "_sleep", fails)
        copied = copy_to_host(MB)
        with pytest.raises(RuntimeError, match="the link is down"):
            wait_copy(copied, MB)


def test_nothing_has_moved_at_once() -> None:
    with EmulatedLink(LINK) as link, copies_by("cpu", link):
        nothing = torch.empty(0)
        assert wait_copy(copy_to_host(nothing), nothing).shape == (0,)
    assert link.copies == []


def test_covered_time_counts_once_what_overlaps() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0
    assert covered([(0.0, 2.0), (5.0, 6.0)], within=[(1.0, 5.5)]) == pytest.approx(1.5)

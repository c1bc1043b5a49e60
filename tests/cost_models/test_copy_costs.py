"""Prices of copies over the host's link, and of files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.copy_costs import copy_action, copy_rate, copy_seconds, duplex, file_seconds, link_rate
from autopar.cost_models.simulator import COMPUTE_STREAM, TO_HOST_STREAM, Action, Interference, simulate
from autopar.hardware.hosts import Host, HostLink, Storage

LINK = HostLink(
    name="link",
    latency_seconds=1e-5,
    to_host_bytes_per_second=20e9,
    from_host_bytes_per_second=30e9,
    both_bytes_per_second=40e9,
    devices_per_link=2,
)
HOST = Host(memory_bytes=10**12, memory_bytes_per_second=100e9, link=LINK)


def test_seconds_are_a_latency_and_the_bytes_over_the_rate_of_their_direction() -> None:
    assert copy_seconds(2e9, HOST, "to_host") == pytest.approx(1e-5 + 0.1)
    assert copy_seconds(3e9, HOST, "from_host") == pytest.approx(1e-5 + 0.1)
    seconds = copy_seconds([0.0, 1e6, 2e6], HOST, "to_host")
    assert seconds[0] == 0.0
    assert np.all(np.diff(seconds) > 0.0)


def test_devices_behind_one_link_each_get_their_part_of_it() -> None:
    assert copy_rate(HOST, "to_host", 2) == pytest.approx(10e9)
    assert copy_rate(HOST, "to_host", 4) == pytest.approx(10e9)  # two links with two devices each
    assert copy_rate(replace(HOST, link=replace(LINK, devices_per_link=1)), "to_host", 4) == pytest.approx(20e9)


def test_the_memory_of_the_host_bounds_what_all_devices_copy() -> None:
    own = replace(HOST, link=replace(LINK, devices_per_link=1))
    assert copy_rate(own, "from_host", 8) == pytest.approx(100e9 / 8)
    assert copy_rate(own, "from_host", 8, both_ways=True) == pytest.approx(100e9 / 16)


def test_both_directions_at_once_share_what_the_link_reaches_in_both() -> None:
    rates = [link_rate(LINK, way, both_ways=True) for way in ("to_host", "from_host")]
    assert rates == pytest.approx([16e9, 24e9])
    full = replace(LINK, both_bytes_per_second=60e9)  # more than the sum of both is no faster than each alone
    assert link_rate(full, "to_host", both_ways=True) == 20e9


def test_files_are_shared_by_all_devices_of_a_node() -> None:
    disk = Storage(name="disk", read_bytes_per_second=8e9, write_bytes_per_second=4e9, latency_seconds=1e-4)
    assert file_seconds(8e9, disk, "read") == pytest.approx(1.0 + 1e-4)
    assert file_seconds(8e9, disk, "write", 4) == pytest.approx(8.0 + 1e-4)


def test_in_the_simulator_devices_behind_one_port_share_it_only_while_both_copy() -> None:
    bytes_of = [2e9, 6e9, 2e9]  # of two devices behind one port, and of one behind the next
    timeline = simulate([
        copy_action("copy", nbytes, HOST, "to_host", place=rank, rank=rank) for rank, nbytes in enumerate(bytes_of)
    ])  # fmt: skip
    # alone 0.1, 0.3 and 0.1 s: the first two at half the rate until 0.2, then 0.2 s more
    assert timeline.end_seconds == pytest.approx((0.2, 0.4, 0.1), rel=1e-3)
    assert timeline.busy_seconds.keys() == {TO_HOST_STREAM}


def test_in_the_simulator_both_directions_of_a_device_are_slower_together() -> None:
    out = copy_action("out", 2e9, HOST, "to_host", place=0)
    back = copy_action("back", 9e9, HOST, "from_host", place=0)
    kernel = Action("mm", COMPUTE_STREAM, 1.0)
    timeline = simulate([kernel, out, back], duplex(LINK))
    # alone 1.0, 0.1 and 0.3 s; 50 GB/s of both directions become 40: 1.25 times as long while both run
    assert timeline.end_seconds == pytest.approx((1.0, 0.125, 0.325), rel=1e-3)


def test_a_copy_takes_no_multiprocessors_from_a_kernel_beside_it() -> None:
    kernel, copy = Action("mm", COMPUTE_STREAM, 1.0), copy_action("out", 20e9, HOST, "to_host", place=0)
    timeline = simulate([kernel, copy], Interference(compute=1.5, communication=2.0))
    assert timeline.end_seconds == pytest.approx((1.0, 1.0), rel=1e-4)

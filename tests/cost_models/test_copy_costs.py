"""Prices of copies over the host's link, and of files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.copy_costs import copy_rate, copy_seconds, file_seconds, link_rate
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

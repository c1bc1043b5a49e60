"""The host, measured: a line through copies of two sizes, and files of a disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from autopar.hardware.cluster import Cluster, check_cluster
from autopar.hardware.operator_profile import OperatorProfile, load_profile, save_profile
from autopar.runtime.calibration.measure_host import Way, measure_host, measured_link, memcpy_seconds
from autopar.runtime.calibration.measure_machine import host_table


def seconds(way: Way, nbytes: int) -> float:
    """A link of 20 GB/s to the host, 25 from it and 36 in both, with 10 us."""
    if way == "both":
        return 1e-5 + 2 * nbytes / 36e9
    return 1e-5 + nbytes / (20e9 if way == "to_host" else 25e9)


def test_rates_and_latency_are_found_again() -> None:
    link = measured_link(seconds, "link", "a test")
    assert link.to_host_bytes_per_second == pytest.approx(20e9, rel=1e-3)
    assert link.from_host_bytes_per_second == pytest.approx(25e9, rel=1e-3)
    assert link.both_bytes_per_second == pytest.approx(36e9, rel=1e-3)
    assert link.latency_seconds == pytest.approx(1e-5, rel=0.05)


def test_both_directions_together_are_never_faster_than_each_alone() -> None:
    parts = {"to_host": 1.0, "from_host": 1.0, "both": 0.5}
    link = measured_link(lambda way, nbytes: seconds("to_host", nbytes) * parts[way], "link", "a test")
    assert link.both_bytes_per_second == 2 * link.to_host_bytes_per_second


def test_this_machine_has_a_sound_host(tmp_path: Path) -> None:
    host = measure_host(memcpy_seconds, "memcpy", is_device_memory=True, folder=tmp_path)
    check_cluster(replace(Cluster.parse("2 cpu"), host=host))
    assert 1e8 < host.link.to_host_bytes_per_second < 1e12
    assert host.memory_bytes_per_second > host.link.to_host_bytes_per_second
    assert host.storage is not None
    assert host.storage.read_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []
    assert host_table(host).row_count == 1


def test_a_profile_of_kernels_brings_its_host_and_an_older_one_none(tmp_path: Path) -> None:
    host = replace(measure_host(seconds, "pinned copies", folder=tmp_path), memory_bytes=7 << 30)
    lab = OperatorProfile(name="lab", device="NVIDIA A100-SXM4-80GB", versions={}, date="now", kernels=())
    profile = replace(lab, host=host)
    preset = Cluster.parse("8 A100")
    found = preset.with_operator_profile(profile).host
    assert found is not None
    assert (found.memory_bytes, found.link.devices_per_link) == (7 << 30, 2)  # nobody measures who shares a link
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    old = msgspec.json.decode((tmp_path / "profile.json").read_bytes())
    del old["host"]
    (tmp_path / "old.json").write_bytes(msgspec.json.encode(old))
    older = load_profile(tmp_path / "old.json")
    assert older.host is None
    assert preset.with_operator_profile(older).host == preset.host

"""Numbers that no machine has are refused by the name of their entry, wherever they stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.hardware.devices import CollectiveFit, OperatorCurve, preset_device
from autopar.hardware.sound_numbers import check_numbers

TWO = Cluster.parse("2x8 H100-SXM")
LINK, DEVICE = TWO.inter_link, TWO.device


@pytest.mark.parametrize("name", ["H100-SXM", "A100-80", "CPU", "MI300X"])
def test_presets_are_sound(name: str) -> None:
    check_numbers(preset_device(name))
    check_numbers(Cluster.parse(f"1x8 {name}"))


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (replace(TWO, num_nodes=0), "num_nodes is 0: write a positive number"),
        (replace(TWO, overlap_slowdown=float("nan")), "overlap_slowdown is nan"),
        (replace(TWO, collective_host_seconds=-1e-3), "collective_host_seconds is -0.001: write 0 or more"),
        (replace(TWO, device=replace(DEVICE, memory_bytes=0)), "device.memory_bytes is 0"),
        (replace(TWO, device=replace(DEVICE, launch_seconds=-1.0)), "device.launch_seconds is -1.0"),
        (replace(TWO, device=replace(DEVICE, flops_per_second={"bfloat16": 0.0})), "flops_per_second.bfloat16 is 0.0"),
        (replace(TWO, inter_link=replace(LINK, bytes_per_second=float("inf"))), "inter_link.bytes_per_second is inf"),
        (replace(TWO, inter_link=replace(LINK, latency_seconds=-1e-6)), "latency_seconds is -1e-06: write 0 or more"),
        (MixedCluster.of([TWO, replace(TWO, devices_per_node=-8)]), r"parts\[1\].devices_per_node is -8"),
    ],
)  # fmt: skip
def test_an_entry_is_named(cluster: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_numbers(cluster)


def test_lines_that_were_measured_are_looked_at_too() -> None:
    fit = CollectiveFit(kind="all_gather", ranks=8, latency_seconds=0.0, bytes_per_second=0.0)
    with pytest.raises(ConfigurationError, match=r"intra_link.fits\[0\].bytes_per_second is 0.0"):
        check_numbers(replace(TWO, intra_link=replace(LINK, fits=(fit,))))


@pytest.mark.parametrize(("work", "seconds"), [((), ()), ((1.0,), (1.0, 2.0)), ((2.0, 1.0), (1.0, 2.0))])
def test_a_curve_ascends_and_has_as_many_seconds_as_work(work: Any, seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="the curve of 'mm'"):
        OperatorCurve(operator="mm", dtype="float32", work=work, seconds=seconds)

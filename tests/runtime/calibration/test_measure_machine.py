import subprocess
import sys
from dataclasses import replace

import pytest

from autopar.cost_models.collective_costs import collective_seconds
from autopar.cost_models.machine_profile import (
    CENSUS,
    PASSES,
    Measurement,
    cluster_from_profile,
    load_profile,
    save_profile,
)
from autopar.cost_models.operator_costs import OPTIMIZER, STREAMING
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.runtime.calibration import measure_machine as calibration
from autopar.runtime.calibration.measure_machine import BRIEF, calibrate, profile_from_points, tables
from autopar.runtime.calibration.measuring_worker import BESIDE, COLLECTIVES, CROWD, SLOWDOWN, WORLD_SIZES, Effort

QUICK = Effort(passes=1, operator_seconds=0.002, census_calls=(1, 1), collective_calls=1, lone_layers=1)
"""Everything is measured; how well is no question of this test."""


def test_operators_are_scaled_where_only_one_process_was_measured_alone() -> None:
    def point(name: str, world_size: int, size: float, seconds: float) -> Measurement:
        return Measurement(name=name, world_size=world_size, ranks=1, size=size, seconds=seconds)

    alone = [point(CENSUS + STREAMING, 1, 3e3, 1e-5), point(CENSUS + STREAMING, 1, 3e6, 3e-4)]
    matmuls = [point("matmul", 1, 256, 1e-3), point("matmul", 4, 256, 2e-3)]
    profile = profile_from_points([*alone, *matmuls])
    one, four = (c.operators[0].seconds for c in profile.ceilings)
    assert one == (1e-5, 3e-4)
    assert four == pytest.approx((2e-5, 6e-4))
    assert profile.ceilings[0].memory_bytes_per_second == pytest.approx(1e10)


def points(crowd: float, seconds: float) -> list[Measurement]:
    return [
        *[Measurement(name="matmul", world_size=size, ranks=1, size=256, seconds=seconds) for size in (1, 2)],
        Measurement(name=CENSUS + STREAMING, world_size=1, ranks=1, size=3e6, seconds=3e-4),
        *[
            Measurement(name=kind, world_size=2, ranks=2, size=size, seconds=seconds)
            for kind in COLLECTIVES
            for size in (1e3, 1e6)
        ],
        Measurement(name=SLOWDOWN, world_size=2, ranks=2, size=0, seconds=1.5),
        Measurement(name=BESIDE, world_size=2, ranks=2, size=0, seconds=seconds),
        *[Measurement(name=CROWD, world_size=size, ranks=1, size=0, seconds=crowd / size) for size in (1, 2)],
    ]


def test_a_profile_of_a_busy_machine_is_marked_and_measured_again(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    found = iter([points(1.5, 1e-3), points(2.0, 2e-3), points(1.02, 4e-4), points(1.03, 5e-4), points(1.01, 6e-4)])
    monkeypatch.setattr(calibration, "measure_points", lambda **_: next(found))
    monkeypatch.setattr(calibration, "measure_host", lambda *_, **__: None)
    first = calibrate()
    assert first.crowd == 1.5
    assert "was busy while it was measured (33% of the CPU went to other processes)" in caplog.text
    assert cluster_from_profile(first, 1).profile.endswith(", while others took 33% of the CPU")
    assert calibrate() == first  # the second was measured in an even busier hour
    brief = calibrate(effort=BRIEF)
    assert (brief.crowd, brief.is_busy, brief.passes) == (1.02, False, 1)
    assert load_profile() == calibrate(effort=BRIEF) == brief
    assert cluster_from_profile(brief, 1).profile == f"measured in one pass: {brief.name}, {brief.date}"
    careful = calibrate()  # for who asks for more passes it is measured again
    assert (careful.crowd, careful.passes) == (1.03, 3)
    assert load_profile() == calibrate() == calibrate(effort=BRIEF) == careful
    assert cluster_from_profile(careful, 1).profile == f"measured: {careful.name}, {careful.date}"


def test_a_profile_of_before_overlap_was_measured_is_measured_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "measure_points", lambda **_: points(1.2, 1e-3))
    save_profile(replace(profile_from_points(points(1.0, 1e-3)), overlaps=()))
    profile = calibrate()  # the machine is busier now, but the old profile says less
    assert profile.crowd == 1.2
    assert [(each.slowdown, each.host_seconds) for each in profile.overlaps] == [(1.5, 1e-3)]


def test_a_failure_names_first_the_process_that_began_it(monkeypatch) -> None:
    started = iter(
        [
            "import sys; sys.exit('RuntimeError: Connection closed by peer [127.0.0.1]')",
            "import sys; sys.exit('ValueError: of this rank')",
            "import os; os.kill(os.getpid(), 9)",
            "",
        ]
    )

    def start(*_: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", next(started)]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    monkeypatch.setattr(calibration, "_start_worker", start)
    with pytest.raises(AutoparError) as error:
        calibration.measure_points()
    heads = [line for line in str(error.value).splitlines() if line.startswith("calibration process")]
    assert heads == [
        "calibration process 2 was ended by SIGKILL (for want of memory? Leave more free and measure again):",
        "calibration process 1 failed (1):",
        "calibration process 0 failed (1):",
    ]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.distributed
def test_a_machine_is_measured_once_and_its_cluster_is_detected_afterwards(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    profile = replace(calibrate(effort=QUICK), crowd=1.0, passes=PASSES)  # however busy the machine of this test is
    save_profile(profile)
    assert [c.world_size for c in profile.ceilings] == list(WORLD_SIZES)
    assert {(g.world_size, g.fit.ranks, g.fit.kind) for g in profile.collectives} == {
        (world_size, ranks, kind) for world_size, ranks in ((2, 2), (4, 2), (4, 4)) for kind in COLLECTIVES
    }
    assert [overlap.world_size for overlap in profile.overlaps] == [2, 4]
    assert all(overlap.slowdown >= 1.0 for overlap in profile.overlaps)
    assert all(point.seconds > 0 for point in profile.points)
    assert all({"mm", STREAMING, OPTIMIZER} <= {curve.operator for curve in c.operators} for c in profile.ceilings)
    assert load_profile() == profile

    with monkeypatch.context() as patch:
        patch.delattr(calibration, "measure_points")
        assert calibrate() == profile
    assert [table.row_count for table in tables(profile)] == [len(profile.ceilings), len(profile.collectives), 1]

    cluster = Cluster.detect(world_size=4)
    if cluster.device.kind == "cpu":
        assert cluster.profile == f"measured: {profile.name}, {profile.date}"
        fit = next(g.fit for g in profile.collectives if (g.fit.ranks, g.fit.kind) == (4, "all_reduce"))
        predicted = collective_seconds("all_reduce", 1e6, GroupTopology.of(cluster, (4,), (0,)), cluster)
        assert predicted == pytest.approx(fit.latency_seconds + 1e6 / fit.bytes_per_second)

import pytest

from autopar.cost_models.collective_costs import collective_seconds
from autopar.cost_models.machine_profile import CENSUS, Measurement, load_profile
from autopar.cost_models.operator_costs import OPTIMIZER, STREAMING
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.runtime.calibration import measure_machine as calibration
from autopar.runtime.calibration.measure_machine import calibrate, profile_from_points, tables
from autopar.runtime.calibration.measuring_worker import COLLECTIVES, WORLD_SIZES, Effort

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


@pytest.mark.slow
@pytest.mark.distributed
def test_a_machine_is_measured_once_and_its_cluster_is_detected_afterwards(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    profile = calibrate(effort=QUICK)
    assert [c.world_size for c in profile.ceilings] == list(WORLD_SIZES)
    assert {(g.world_size, g.fit.ranks, g.fit.kind) for g in profile.collectives} == {
        (world_size, ranks, kind) for world_size, ranks in ((2, 2), (4, 2), (4, 4)) for kind in COLLECTIVES
    }
    assert all(point.seconds > 0 for point in profile.points)
    assert all({"mm", STREAMING, OPTIMIZER} <= {curve.operator for curve in c.operators} for c in profile.ceilings)
    assert load_profile() == profile

    with monkeypatch.context() as patch:
        patch.delattr(calibration, "measure_points")
        assert calibrate() == profile
    assert [table.row_count for table in tables(profile)] == [len(profile.ceilings), len(profile.collectives)]

    cluster = Cluster.detect(world_size=4)
    if cluster.device.kind == "cpu":
        assert cluster.profile == f"measured: {profile.name}, {profile.date}"
        fit = next(g.fit for g in profile.collectives if (g.fit.ranks, g.fit.kind) == (4, "all_reduce"))
        predicted = collective_seconds("all_reduce", 1e6, GroupTopology.of(cluster, (4,), (0,)), cluster)
        assert predicted == pytest.approx(fit.latency_seconds + 1e6 / fit.bytes_per_second)

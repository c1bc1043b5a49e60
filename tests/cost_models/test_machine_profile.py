import msgspec
import numpy as np
import pytest

from autopar.cost_models.collective_costs import collective_seconds
from autopar.cost_models.machine_profile import (
    Ceilings,
    GroupFit,
    Measurement,
    Overlap,
    Profile,
    cluster_from_profile,
    curves_through,
    fit_line,
    load_profile,
    profile_path,
    save_profile,
)
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import CollectiveFit
from autopar.hardware.group_topology import GroupTopology

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def _ceilings(world_size: int, rate: float) -> Ceilings:
    return Ceilings(
        world_size=world_size,
        flops_per_second={"float32": rate},
        memory_bytes_per_second=rate / 10,
        operator_seconds=1e-6,
        operators=curves_through([("tanh", 1e4, 1e6 / rate)], "float32"),
    )


PROFILE = Profile(
    name="test-machine",
    device="CPU",
    versions={"torch": "2.13"},
    date="2026-01-01T00:00:00+00:00",
    ceilings=(_ceilings(4, 20e9), _ceilings(1, 40e9), _ceilings(2, 40e9)),
    collectives=tuple(
        GroupFit(
            world_size=world_size,
            fit=CollectiveFit(
                kind=kind, ranks=ranks, latency_seconds=1e-4 * ranks, bytes_per_second=1e9 / world_size
            ),
        )
        for world_size, ranks in ((2, 2), (4, 2), (4, 4))
        for kind in KINDS
    ),
    points=(Measurement(name="overhead", world_size=1, ranks=1, size=0, seconds=1e-6),),
    overlaps=(
        Overlap(world_size=4, slowdown=2.0, host_seconds=6e-3),
        Overlap(world_size=2, slowdown=1.5, host_seconds=2e-3),
    ),
)


def test_a_profile_reads_back_equal_and_leaves_clusters_for_detect(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    assert load_profile() is None
    assert save_profile(PROFILE) == profile_path()
    assert load_profile() == PROFILE
    detected = Cluster.detect(world_size=4)
    if detected.device.kind == "cpu":
        assert detected == cluster_from_profile(PROFILE, 4)


def test_a_damaged_profile_is_an_error(tmp_path) -> None:
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="calibrate again"):
        load_profile(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("world_size", "slowdown", "host_seconds"), [(2, 1.5, 2e-3), (3, 2.0, 6e-3), (4, 2.0, 6e-3), (8, 2.0, 12e-3)]
)
def test_what_collectives_take_follows_the_number_of_busy_processes(
    world_size: int, slowdown: float, host_seconds: float
) -> None:
    cluster = cluster_from_profile(PROFILE, world_size)
    assert (cluster.overlap_slowdown, cluster.collective_host_seconds) == (slowdown, host_seconds)


def test_a_profile_of_before_overlap_was_measured_takes_nothing(tmp_path) -> None:
    document = msgspec.json.decode(msgspec.json.encode(PROFILE))
    del document["overlaps"]
    path = tmp_path / "old.json"
    path.write_bytes(msgspec.json.encode(document))
    profile = load_profile(path)
    assert profile is not None
    cluster = cluster_from_profile(profile, 2)
    assert (cluster.overlap_slowdown, cluster.collective_host_seconds) == (1.0, 0.0)


@pytest.mark.parametrize(("world_size", "rate"), [(1, 40e9), (2, 40e9), (3, 20e9), (4, 20e9), (8, 10e9)])
def test_ceilings_follow_the_number_of_busy_processes(world_size: int, rate: float) -> None:
    cluster = cluster_from_profile(PROFILE, world_size)
    assert cluster.num_devices == world_size
    assert cluster.collective_backend == "gloo"
    assert cluster.device.flops_per_second["float32"] == rate
    assert cluster.device.memory_bytes_per_second == rate / 10
    assert [curve.seconds for curve in cluster.device.operators] == [pytest.approx((1e6 / rate,))]


@pytest.mark.parametrize("kind", KINDS)
def test_measured_ring_sizes_are_priced_by_their_own_line(kind) -> None:
    cluster, sizes = cluster_from_profile(PROFILE, 4), np.array([1e3, 1e6])
    for axis, ranks in ((0, 2), (1, 2)):
        topology = GroupTopology.of(cluster, (2, 2), (axis,))
        assert collective_seconds(kind, sizes, topology, cluster) == pytest.approx(
            1e-4 * ranks + sizes / 0.25e9
        )
    whole = GroupTopology.of(cluster, (2, 2), (0, 1))
    assert collective_seconds(kind, sizes, whole, cluster) == pytest.approx(4e-4 + sizes / 0.25e9)


def test_no_process_is_an_error() -> None:
    with pytest.raises(ConfigurationError):
        cluster_from_profile(PROFILE, 0)


def test_fit_line_recovers_latency_and_rate() -> None:
    sizes = np.array([1e3, 1e5, 1e7])
    assert fit_line(sizes, 2e-4 + sizes / 5e8) == pytest.approx((2e-4, 5e8))


def test_a_point_that_came_out_next_to_nothing_does_not_draw_the_line() -> None:
    """An exchange between two ranks at 200 Mbit/s, measured on an emulated network: 3.1 GB/s, where that point counted
    as it was."""
    sizes = [1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
    seconds = [1.3e-3, 1.9e-3, 2e-5, 7.2e-3, 24.9e-3, 90.9e-3]
    latency, rate = fit_line(sizes, seconds)
    assert latency + sizes[-1] / rate == pytest.approx(seconds[-1], rel=0.2)
    assert 0.5e-3 < latency < 2e-3
    assert fit_line(sizes[::-1], seconds[::-1]) == pytest.approx((latency, rate))


def test_fit_line_stays_positive_on_points_no_line_explains() -> None:
    for seconds in ([1e-3, 1e-3, 5e-4], [1e-7, 1e-4, 1e-1]):
        latency, rate = fit_line([1e3, 1e5, 1e7], seconds)
        assert latency >= 0
        assert 0 < rate < np.inf

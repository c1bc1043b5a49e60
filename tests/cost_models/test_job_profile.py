import dataclasses

import pytest

from autopar.cost_models.collective_costs import collective_seconds
from autopar.cost_models.job_profile import (
    JobProfile,
    LinkFit,
    cluster_of_job,
    groups_of_job,
    job_profile_path,
    load_job_profile,
    save_job_profile,
)
from autopar.cost_models.machine_profile import Ceilings, Profile
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import OperatorCurve
from autopar.hardware.group_topology import GroupTopology

CURVE = OperatorCurve(operator="mm", dtype="float32", work=(1e6, 1e9), seconds=(1e-4, 1e-1))
MACHINE = Profile(
    name="test-machine",
    device="CPU",
    versions={},
    date="2026-01-01T00:00:00+00:00",
    ceilings=(
        Ceilings(
            world_size=4,
            flops_per_second={"float32": 1e10},
            memory_bytes_per_second=1e9,
            operator_seconds=1e-6,
            operators=(CURVE,),
        ),
    ),
    collectives=(),
    points=(),
)
RATES = {(4, 2): 10e6, (2, 2): 20e6, (2, 1): 1e9}
"""(ranks, nodes) -> bytes/s: on 2 nodes of 2 ranks, pairs inside of a node are fast."""
PROFILE = JobProfile(
    machine=MACHINE,
    nodes=2,
    ranks_per_node=2,
    links=tuple(
        LinkFit(kind=kind, ranks=ranks, nodes=nodes, latency_seconds=1e-3, bytes_per_second=rate)
        for (ranks, nodes), rate in RATES.items()
        for kind in ("all_reduce", "neighbours")
    ),
)


def test_every_group_is_priced_by_the_line_of_its_shape() -> None:
    cluster = cluster_of_job(PROFILE)
    for axes, shape in (((0, 1), (4, 2)), ((0,), (2, 2)), ((1,), (2, 1))):
        topology = GroupTopology.of(cluster, (2, 2), axes)
        assert (topology.ranks, topology.nodes) == shape
        for kind in ("all_reduce", "neighbours"):
            seconds = collective_seconds(kind, 1e6, topology, cluster)
            assert seconds == pytest.approx(1e-3 + 1e6 / RATES[shape]), (kind, shape)


def test_the_shape_of_a_group_counts() -> None:
    """The mutation that the test above must catch: lines of pairs inside and across, exchanged."""
    swapped = {(2, 2): 1, (2, 1): 2}
    links = tuple(dataclasses.replace(fit, nodes=swapped.get((fit.ranks, fit.nodes), 2)) for fit in PROFILE.links)
    cluster = cluster_of_job(dataclasses.replace(PROFILE, links=links))
    found = collective_seconds("all_reduce", 1e6, GroupTopology.of(cluster, (2, 2), (1,)), cluster)
    assert found != pytest.approx(1e-3 + 1e6 / RATES[2, 1])


def test_a_job_finds_its_profile_and_other_jobs_do_not(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr("autopar.hardware.cluster.machine_name", lambda: "test-machine")
    path = save_job_profile(PROFILE)
    assert path == job_profile_path("test-machine", 2, 2)
    assert load_job_profile(path) == PROFILE
    if Cluster.detect(world_size=4).device.kind == "cuda":
        pytest.skip("this machine has a GPU")
    assert Cluster.detect(world_size=4).num_nodes == 1
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert Cluster.detect() == cluster_of_job(PROFILE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert Cluster.detect().num_nodes == 4
    assert Cluster.detect().profile.startswith("preset")


def test_a_file_that_is_no_profile_is_told(tmp_path) -> None:
    assert load_job_profile(tmp_path / "none") is None
    (tmp_path / "wrong").write_text("{}")
    with pytest.raises(ConfigurationError, match="is not a profile of a job"):
        load_job_profile(tmp_path / "wrong")


@pytest.mark.parametrize(
    ("nodes", "per_node", "shapes"),
    [
        (4, 1, {(4, 4): [[0, 1, 2, 3]], (2, 2): [[0, 1], [2, 3]]}),
        (2, 2, {(4, 2): [[0, 1, 2, 3]], (2, 1): [[0, 1], [2, 3]], (2, 2): [[0, 2], [1, 3]]}),
        (1, 1, {}),
        (3, 1, {(3, 3): [[0, 1, 2]], (2, 2): [[0, 1]]}),
    ],
)
def test_groups_of_every_shape_are_measured(nodes, per_node, shapes) -> None:
    assert groups_of_job(nodes, per_node) == shapes


def test_what_overlap_costs_is_a_number_of_the_cluster() -> None:
    assert cluster_of_job(dataclasses.replace(PROFILE, overlap_slowdown=1.5)).overlap_slowdown == 1.5
    assert cluster_of_job(PROFILE).overlap_slowdown == 1.0

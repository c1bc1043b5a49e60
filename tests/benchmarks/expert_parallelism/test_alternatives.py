"""Ways to run experts are plans of the kinds they are named after, and their bytes lie on the links they should."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import autopar
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from benchmarks.expert_parallelism.alternatives import in_words, predicted_links, under_load, wishes
from benchmarks.expert_parallelism.settings import Sizes, setting
from benchmarks.netlab.pipelines.traffic import link_bytes, sent_bytes
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.plans import same_choices

SMALL = setting(Sizes(batch=8, length=8, layers=1, width=16, heads=2, hidden=24, experts=4, chosen=2), "flat-1gbit")
FLAT, IN_NODES = "4x1 cpu @ 0.2Gb", "2x2 cpu @ 0.2Gb"


@functools.cache
def captured() -> Captured:
    return Captured(SMALL)


@functools.cache
def planner(cluster: str) -> autopar.Planner:
    model, inputs = SMALL.model_and_inputs()
    return autopar.Planner(model, inputs, cluster=cluster, optimizer=torch.optim.SGD)


def plan_of(way: str, cluster: str) -> Plan:
    return planner(cluster).plan(**wishes(Cluster.parse(cluster))[f"autopar as {way}"])


def predicted_of(way: str, cluster: str) -> dict[str, Any]:
    return predicted_links(captured(), plan_of(way, cluster), Cluster.parse(cluster))


def total(said: dict[str, Any]) -> float:
    return float(sum(map(sum, said["link_bytes"])))


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("dispatch", "ep=4, experts t+e"),
        ("masked", "ep=4, experts e"),
        ("gather", "dp_shard=4, experts t"),
        ("replicated", "dp_replicate=4, experts t"),
        ("dispatch in nodes", "dp_replicate=2 x ep=2, experts t x t+e"),
        ("dispatch in two hops", "ep=2 x ep_inner=2, experts t+e x t+e"),
    ],
)
def test_a_way_is_what_its_name_says(way: str, words: str) -> None:
    assert in_words(plan_of(way, IN_NODES)) == words


@pytest.mark.parametrize("cluster", [FLAT, IN_NODES], ids=["flat", "in nodes"])
@pytest.mark.parametrize("way", ["dispatch", "gather", "replicated"])
def test_links_carry_what_ranks_send(way: str, cluster: str) -> None:
    said = predicted_of(way, cluster)
    links = said["link_bytes"]
    assert total(said) == pytest.approx(sum(said["sent_bytes"]))
    others = [sent for node, row in enumerate(links) for peer, sent in enumerate(row) if node != peer]
    assert others == pytest.approx([others[0]] * len(others), rel=0.02)
    assert others[0] > 0
    assert not any(links[node][node] for node in range(len(links)))


def test_links_within_a_group_carry_more_than_those_between_groups() -> None:
    """Four nodes, 2 x 2: rows go to the neighbour on one axis, gradients of experts to that on the other; what goes to
    the fourth node is of gradients that all add up."""
    plan = planner(FLAT).plan(dims={"dp_replicate": 2, "ep": 2}, ep="dispatch", micro_batches=1, mode="fast")
    links = link_bytes(captured().program(plan), plan, Cluster.parse(FLAT))
    for node, (ep, dp_replicate, both) in {0: (1, 2, 3), 3: (2, 1, 0)}.items():
        assert links[node][both] < 0.9 * min(links[node][ep], links[node][dp_replicate])
    assert sum(map(sum, links)) == pytest.approx(sum(sent_bytes(captured().program(plan), plan, Cluster.parse(FLAT))))


def test_links_carry_rows_to_where_the_experts_are() -> None:
    """Half of the rows go to the first of four nodes, and come back from there."""
    cluster, loads = Cluster.parse(FLAT), [[0.5, 0.25, 0.25, 0.0]]
    plan = planner(FLAT).plan(**wishes(cluster, loads)["autopar as dispatch without copies"])
    links = predicted_links(captured(), plan, cluster)["link_bytes"]
    more = links[1][0] - links[1][3]  # there and back: 0.5 + 0.25 of the rows, and 0 + 0.25
    assert more > 0
    for node, peer, part in ((3, 0, 0.5), (0, 3, 0.5), (1, 2, 0.5), (2, 1, 0.5), (2, 3, 0.25), (3, 2, 0.25)):
        assert links[node][peer] - links[1][3] == pytest.approx((part - 0.25) / 0.5 * more, abs=0.05 * more)
    blind = plan.with_(question={**plan.question, "expert_load": None})
    assert predicted_links(captured(), under_load(blind, loads), cluster)["link_bytes"] == links
    copies = planner(FLAT).plan(**{**wishes(cluster, loads)["autopar as dispatch"], "replicated_experts": 1})
    assert copies.replicated_experts == {"layers.0.feed_forward": (0,)}
    assert same_choices(copies, copies)
    assert not same_choices(copies, copies.with_(replicated_experts={}))

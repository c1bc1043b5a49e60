"""Products of experts over an axis `ep` run in one way: the one asked for, else that of the shortest step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ConfigurationError, InfeasibleError, PlanMismatchError
from autopar.explain.origin import Remembered
from autopar.explain.recovered import query_of
from autopar.hardware.cluster import Cluster
from autopar.planner.one_mesh.query import Query
from autopar.planner.planning import make_plan
from autopar.planner.search.expert_ways import in_two_levels, planned_in_every_expert_way
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import expert_way, parallelism
from autopar.program import Program
from autopar.request import Request
from tests.capture.expert_models import mixture
from tests.passes.hand_plans import run_plan, worst
from tests.passes.kernels.test_dispatched_rows import captured, products
from tests.planner.problems import captured_mlp

WAYS = {"dispatch": "t+e", "gather": "t", "masked": "e"}


def asked(program: Program, ranks: int = 4, **options: Any) -> Plan:
    cluster = Cluster.parse(f"{ranks} cpu")
    request = Request(cluster=cluster, **{"dims": {"ep": ranks}, "mode": "fast", "with_baselines": False, **options})
    return make_plan(program, request)


@pytest.mark.parametrize(("way", "split"), WAYS.items())
def test_every_way_equals_one_rank(way: str, split: str) -> None:
    program, tensors = captured(8, "even")
    plan = asked(program, ep=way)
    assert products(plan) == {(split,)}
    assert plan.question["ep"] == way
    whole = asked(program, 1, dims={"dp_shard": 1})
    assert worst(run_plan(program, plan, tensors), run_plan(program, whole, tensors)) < 1e-13


def test_the_shortest_step_of_all_ways_is_the_answer() -> None:
    program, _ = captured(8, "even")
    steps = {way: asked(program, ep=way).predicted.step_seconds for way in WAYS}
    free = asked(program)
    assert free.predicted.step_seconds == min(steps.values()) == steps["gather"]
    assert "ep" not in free.question
    (note,) = (note for note in free.notes if "shortest step" in note)
    said = re.search(r"gather has the shortest step \(dispatch .*, gather .*, masked .*\)", note)
    assert said, note


def answer(steps: Mapping[str, float], dims: Mapping[str, int], program: Program) -> tuple[Plan, list[str | None]]:
    """The answer where the plans of the ways take so long, and the ways that were searched; what has no seconds has no
    plan."""
    request = Request(cluster=Cluster.parse("4 cpu"), dims=dims, mode="fast")
    searched: list[str | None] = []

    def search(request: Request, query: Query) -> Plan:
        way = query.constraints.ep
        searched.append(way)
        if str(way) not in steps:
            raise InfeasibleError(f"{way} does not fit")
        plan = asked(program, ep=way, dims={"ep": 4})
        return replace(plan, predicted=replace(plan.predicted, step_seconds=steps[str(way)]), bound_seconds=1e-5)

    return planned_in_every_expert_way(search, request, Query.of(program, request)), searched


def test_a_way_that_does_not_fit_leaves_the_others() -> None:
    program, _ = captured(8, "even")
    plan, searched = answer({"gather": 2.0, "masked": 1.0}, {"ep": 4}, program)
    assert (products(plan), searched) == ({("e",)}, list(WAYS))
    assert plan.gap > 0.9, "the bound is that of all ways"
    with pytest.raises(InfeasibleError, match="dispatch does not fit"):
        answer({}, {"ep": 4}, program)


def test_without_the_axis_or_experts_there_is_one_search() -> None:
    program, _ = captured(8, "even")
    assert answer({"None": 1.0}, {"tp": 4}, program)[1] == [None]
    assert answer({"None": 1.0}, {"ep": 4}, captured_mlp())[1] == [None]


def test_a_way_that_cannot_run_is_not_planned_twice() -> None:
    """Six experts over four ranks: dispatch ends in gathered weights."""
    program, _ = captured(6, "even")
    assert answer(dict.fromkeys(WAYS, 1.0), {"ep": 4}, program)[1] == ["dispatch", "masked"]


def test_a_plan_is_asked_in_the_way_of_its_experts() -> None:
    """Nobody asked for it; a free product among the others would look cheaper than it is."""
    model, inputs = mixture("hits")
    planner = autopar.Planner(model, inputs, cluster="2 cpu")
    plan = planner.plan(dims={"ep": 2}, ep="dispatch", mode="fast")
    free = planner.plan(dims={"ep": 2}, mode="fast")
    assert (expert_way(plan), "ep" in free.question) == ("dispatch", False)
    for each in (plan, free):
        assert isinstance(each.origin, Remembered)
        assert query_of(each.origin.source, each).constraints.ep == expert_way(each) is not None
        product = next(name for name in each.operators if "expert_linear#0" in name)
        assert product in str(each.explain(product))
    other = plan.what_if(ep="masked")
    assert (other.question["ep"], expert_way(other)) == ("masked", "masked")


def test_a_capacity_is_never_chosen_and_stays_with_its_plan() -> None:
    """A file tells it to whoever asks about the plan."""
    model, inputs = mixture("hits")
    planner = autopar.Planner(model, inputs, cluster="2 cpu")
    plan = planner.plan(dims={"ep": 2}, ep="capacity", expert_capacity=1.5, mode="fast")
    again = planner.bind(Plan.from_json(plan.to_json()))
    product = next(name for name in plan.operators if "expert_linear#0" in name)
    assert (expert_way(again), again.expert_capacity) == ("capacity", 1.5)
    assert str(again.explain(product)) == str(plan.explain(product))
    assert isinstance(again.origin, Remembered)
    assert query_of(again.origin.source, again).constraints.ep == "capacity"
    assert "predicted" in str(plan.explain(vs="DDP"))
    free = plan.what_if(ep=None, expert_capacity=None)
    assert not any("capacity" in note for note in free.notes)
    with pytest.raises(ConfigurationError, match="write ep='capacity', or leave it out"):
        plan.what_if(ep="dispatch")


def test_the_axis_is_called_by_what_runs() -> None:
    program, _ = captured(8, "even")
    called = {way: parallelism(asked(program, ep=way)) for way in WAYS}
    assert called["dispatch"] == called["masked"] == "expert parallelism over 4 devices"
    assert "expert" not in called["gather"]


def test_a_skewed_load_is_planned_with_copies_of_the_busiest_experts() -> None:
    program, tensors = captured(8, "one expert has all")
    skewed = {"ep": "dispatch", "expert_load": {"": [0, 0, 0, 0, 0, 0, 0, 1]}}
    none, one = (asked(program, replicated_experts=number, **skewed) for number in (0, 1))
    free = asked(program, **skewed)
    assert one.replicated_experts == {"": (7,)} == free.replicated_experts
    assert one.predicted.step_seconds < none.predicted.step_seconds
    assert free.predicted.step_seconds == one.predicted.step_seconds
    assert any(note.startswith("experts of which every rank has a copy: 1 of each layer (none") for note in free.notes)
    assert asked(program, ep="dispatch").replicated_experts == {}, "nothing is known of an even load"
    whole = asked(program, 1, dims={"dp_shard": 1})
    assert worst(run_plan(program, free, tensors), run_plan(program, whole, tensors)) < 1e-13


def test_a_plan_with_copies_is_kept_bound_and_asked(tmp_path: Path) -> None:
    model, inputs = mixture("hits")
    planner = autopar.Planner(model, inputs, cluster="2 cpu")
    skewed = {"dims": {"ep": 2}, "ep": "dispatch", "mode": "fast", "expert_load": "zipf:3"}
    plan = planner.plan(**skewed, replicated_experts=2)
    plan.save(tmp_path / "plan.json")
    again = planner.bind(Plan.load(tmp_path / "plan.json"), **skewed, replicated_experts=2)
    assert again.replicated_experts == plan.replicated_experts != {}
    product = next(name for name in again.operators if "expert_linear#0" in name)
    assert "all_reduce" in str(again.explain(product))
    assert "all_reduce" not in str(planner.plan(**skewed, replicated_experts=0).explain(product))
    module = next(iter(plan.replicated_experts))
    for wrong, words in (({module: (0, 99)}, "write experts from 0 to"), ({"nowhere": (0,)}, "no experts there")):
        with pytest.raises(PlanMismatchError, match=words):
            planner.bind(plan.with_(replicated_experts=wrong), **skewed)


class Wide(nn.Module):
    """Experts that are dear to gather, for few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 8)
        self.up = nn.Parameter(torch.randn(8, 64, 2048) / 8)
        self.down = nn.Parameter(torch.randn(8, 2048, 64) / 45)

    def forward(self, x: Tensor) -> Tensor:
        score, chosen = self.router(x).softmax(-1).max(-1)
        rows = torch.ops.autopar.expert_linear(x.flatten(0, 1), self.up, chosen.flatten(), False)
        rows = torch.ops.autopar.expert_linear(rows.relu(), self.down, chosen.flatten(), False)
        return (rows.view_as(x) * score.unsqueeze(-1)).pow(2).mean()


def test_on_free_axes_rows_may_travel() -> None:
    planner = autopar.Planner(Wide(), (torch.randn(256, 16, 64),), cluster="4x1 cpu @ 0.2Gb", optimizer=torch.optim.SGD)
    free = planner.plan(mode="fast", with_baselines=True)
    named = planner.plan(mode="fast", dims={"ep": 4}, ep="dispatch")
    assert (expert_way(free), free.mesh.axis_names) == ("dispatch", ("ep",))
    assert free.predicted.step_seconds == named.predicted.step_seconds
    assert any(note.startswith("rows of experts may travel: ep=4 has the shortest step") for note in free.notes)
    assert free.baselines, "known plans are compared with once"
    assert expert_way(planner.plan(mode="fast", constraints={"down": "R"})) is None


class Many(nn.Module):
    """Of 32 experts that are dear to gather four for every token, so that many lie on one node."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 32)
        self.up = nn.Parameter(torch.randn(32, 64, 1024) / 8)
        self.down = nn.Parameter(torch.randn(32, 1024, 64) / 32)

    def forward(self, x: Tensor) -> Tensor:
        score, chosen = self.router(x).softmax(-1).topk(4, -1)
        rows = x.unsqueeze(2).expand(-1, -1, 4, -1).flatten(0, 2)
        rows = torch.ops.autopar.expert_linear(rows, self.up, chosen.flatten(), False)
        rows = torch.ops.autopar.expert_linear(rows.relu(), self.down, chosen.flatten(), False)
        return (rows.view(*x.shape[:2], 4, -1) * score.unsqueeze(-1)).sum(2).pow(2).mean()


def test_two_hops_are_taken_where_nodes_are_far_and_stay_with_the_plan() -> None:
    planner = autopar.Planner(Many(), (torch.randn(64, 64, 64),), cluster="2x4 cpu @ 0.2Gb", optimizer=torch.optim.SGD)
    asked: dict[str, Any] = {"dims": {"ep": 8}, "mode": "fast"}
    free, near = (planner.plan(**{**asked, **ways}) for ways in ({}, {"ep": "dispatch"}))
    assert (expert_way(free), free.mesh.axis_names, free.mesh.shape) == ("two_level", ("ep", "ep_inner"), (2, 4))
    assert free.predicted.step_seconds < near.predicted.step_seconds
    assert parallelism(free) == "two-level expert parallelism over 8 devices"
    assert any("two_level has the shortest step (dispatch" in note for note in free.notes)
    again = planner.bind(Plan.from_json(free.to_json()))
    product = next(name for name in again.operators if "expert_linear#0" in name)
    assert (expert_way(again), str(again.explain(product))) == ("two_level", str(free.explain(product)))
    assert isinstance(again.origin, Remembered)
    assert query_of(again.origin.source, again).constraints.ep == "two_level"


@pytest.mark.parametrize(
    ("nodes", "dims", "found"),
    [
        ("2x4", {"ep": 8}, {"ep": 2, "ep_inner": 4}),
        ("2x4", {"ep": -1, "tp": 2}, {"ep": 2, "ep_inner": 2, "tp": 2}),
        ("4x2", {"dp_shard": 2, "ep": 4}, {"dp_shard": 2, "ep": 2, "ep_inner": 2}),
        ("1x8", {"ep": 2, "ep_inner": 4}, {"ep": 2, "ep_inner": 4}),
        ("1x8", {"ep": 8}, None),  # inside of a node
        ("2x4", {"ep": 2, "tp": 4}, None),  # across nodes alone
        ("2x4", {"dp_shard": 2, "ep": 4}, None),
        ("2x3", {"ep": 2, "tp": 3}, None),
    ],
)
def test_an_axis_of_experts_is_cut_where_nodes_end(nodes: str, dims: dict[str, int], found: object) -> None:
    cluster = Cluster.parse(f"{nodes} cpu")
    if found is None:
        with pytest.raises(ConfigurationError, match=r"is not cut by the nodes of .* name two axes"):
            in_two_levels(dims, cluster)
    else:
        assert in_two_levels(dims, cluster) == found


def test_what_fits_with_rows_that_travel_alone_is_found() -> None:
    program, _ = captured(8, "even")
    request = Request(cluster=Cluster.parse("4 cpu"), mode="fast", with_baselines=False)

    def search(request: Request, query: Query) -> Plan:
        if request.dims is None:
            raise InfeasibleError("free axes do not fit")
        return asked(program, ep=query.constraints.ep, dims=request.dims)

    plan = planned_in_every_expert_way(search, request, Query.of(program, request))
    assert expert_way(plan) == "dispatch"
    with pytest.raises(InfeasibleError, match="free axes"):
        planned_in_every_expert_way(search, replace(request, constraints={"down": "R"}), Query.of(program, request))

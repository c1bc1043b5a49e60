"""Experts of a capacity: loss and gradients of a plain mixture that drops the same rows, whoever runs what where."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autopar.capture import Captures, capture
from autopar.graphs.expert_capacity import with_expert_capacity
from autopar.graphs.node_values import VARYING
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.ops.capped_rows import counted_drops
from autopar.passes.kernels import capped_layer, zero_rows
from autopar.passes.kernels.compilable_pieces import cut_into_pieces
from autopar.passes.kernels.travelling_layer import Rows
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.passes.lowering import chain as lowering
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.questions import CapturedModel, plan_again
from autopar.request import Request
from autopar.runtime.step.replayed_graphs import waits_for_values
from autopar.runtime.step_log import StepLog
from tests.passes.hand_plans import Results, hand_plan, picked, run_plan, tensors_of, worst

WIDTH, HIDDEN, CHOSEN, BATCH, TOKENS = 8, 12, 2, 8, 4
ROWS = BATCH * TOKENS * CHOSEN
FACTOR = 1.1


class Mixture(nn.Module):
    """Experts whose rows go where an input says: (B, S, D), (B, S, k), (B, S, k) -> loss. between: what runs on the
    rows of the hidden layer; behind: on those of the result."""

    def __init__(self, experts: int, between: str, behind: str) -> None:
        super().__init__()
        self.between, self.behind = between, behind
        self.before = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(experts, 2 * HIDDEN)) if between == "bias" else None
        self.late = nn.Parameter(torch.randn(experts, WIDTH)) if behind == "bias" else None

    def product(self, rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """Every row with the matrix of its expert."""
        return torch.ops.autopar.expert_linear(rows, weight, ids, False)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        x = functional.silu(self.before(x))
        ids = chosen.reshape(-1)
        rows = x.unsqueeze(2).expand(-1, -1, CHOSEN, -1).reshape(-1, WIDTH)
        rows = self.product(rows, self.up, ids)
        rows = rows if self.bias is None else rows + functional.embedding(ids, self.bias)
        gate, rows = rows.chunk(2, -1)
        rows = functional.silu(gate) * rows
        rows = rows * rows.square().mean(-1, keepdim=True).rsqrt() if self.between == "norm" else rows
        penalty = (rows + 1).square().mean() if self.between == "penalty" else 0.0
        rows = self.product(rows, self.down, ids)
        rows = rows if self.late is None else rows + functional.embedding(ids, self.late)
        rows = rows.exp() if self.behind == "exp" else rows
        mixed = (rows * weights.reshape(-1, 1)).view(*x.shape[:2], CHOSEN, WIDTH).sum(2)
        return (x + mixed).square().mean(dim=(1, 2)).sum() + penalty


class Dropped(Mixture):
    """The same in plain torch; products of rows that have no place are zero, and are no products."""

    kept: Tensor

    def product(self, rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        found = rows.new_zeros(len(rows), weight.shape[2])
        found[self.kept] = (rows[self.kept].unsqueeze(1) @ weight[ids[self.kept]]).squeeze(1)
        return found


@dataclass(frozen=True)
class Case:
    """A mixture of so many experts, its tensors, and what it is captured as."""

    experts: int
    model: Mixture
    inputs: Mapping[str, Tensor]
    program: Program
    tensors: dict[str, Tensor]


def routed(kind: str, experts: int) -> Tensor:
    """Experts of every token's choices: skewed, so that some get several times as many as others."""
    ids = (torch.rand(BATCH, TOKENS, CHOSEN, generator=torch.Generator().manual_seed(5)).pow(2) * experts).long()
    return {
        "skewed": ids,
        "one expert has all": torch.full_like(ids, experts - 1),
        "a rank without tokens": ids.clamp(max=(experts - 1) // 2),
        "some of no expert": torch.where(ids == 1, experts + 3, ids) - (torch.arange(CHOSEN) * (ids == 0)),
    }[kind]


@cache
def captured(experts: int, between: str, behind: str) -> Case:
    torch.manual_seed(0)
    model = Mixture(experts, between, behind).double()
    inputs = {
        "x": torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64),
        "weights": torch.rand(BATCH, TOKENS, CHOSEN, dtype=torch.float64),
        "chosen": routed("skewed", experts),
    }
    program = capture(model, (), inputs)
    return Case(experts, model, inputs, program, tensors_of(program, model, inputs))


def case(experts: int = 8, kind: str = "skewed", between: str = "bias", behind: str = "") -> Case:
    """A mixture whose rows go to experts so; the program is the same for all."""
    of = captured(experts, between, behind)
    inputs = {**of.inputs, "chosen": routed(kind, experts)}
    return replace(of, inputs=inputs, tensors=tensors_of(of.program, of.model, inputs))


def kept_rows(ids: Tensor, ranks: int, experts: int, factor: float) -> Tensor:
    """Whether every row has a place, if `ranks` ranks have as many of them each: the first of every expert have."""
    kept = torch.zeros(len(ids), dtype=torch.bool)
    each = len(ids) // ranks
    places = math.ceil(factor * each / experts - 1e-9)
    for rank in range(ranks):
        taken = [0] * experts
        for row in range(rank * each, (rank + 1) * each):
            expert = int(ids[row])
            if 0 <= expert < experts:
                kept[row] = taken[expert] < places
                taken[expert] += 1
    return kept


def dropping(of: Case, ranks: int, factor: float = FACTOR) -> Dropped:
    """The mixture in plain torch."""
    model = Dropped(of.experts, of.model.between, of.model.behind).double()
    model.load_state_dict(of.model.state_dict())
    model.kept = kept_rows(of.inputs["chosen"].reshape(-1), ranks, of.experts, factor)
    return model


def reference(of: Case, ranks: int, factor: float = FACTOR) -> Results:
    """Loss and gradients of it on one device."""
    model = dropping(of, ranks, factor)
    loss = model(**of.inputs)
    loss.backward()
    (name,) = [output.name for output in of.program.outputs if output.role == "loss"]
    return Results({name: loss.detach()}, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def planned(of: Case, factor: float | None = FACTOR, **dims: int) -> Plan:
    """The plan under named axes, of which one is `ep`; without a factor rows travel as they are."""
    return _planned(of.experts, of.model.between, of.model.behind, factor, tuple(dims.items()))


@cache
def _planned(experts: int, between: str, behind: str, factor: float | None, axes: tuple[tuple[str, int], ...]) -> Plan:
    of, dims = captured(experts, between, behind), dict(axes)
    cluster = Cluster.parse(f"{math.prod(dims.values())} cpu")
    ways = {"ep": "dispatch"} if factor is None else {"ep": "capacity", "expert_capacity": factor}
    request = Request(cluster=cluster, dims=dims, mode="fast", with_baselines=False, **ways)
    plan = make_plan(of.program, request)
    assert products(plan) == {tuple({"ep": "t+e", "tp": None}.get(name, "t") for name in dims)} or "tp" in dims
    return plan


def products(plan: Plan) -> set[tuple[str | None, ...]]:
    """What the axes split of the products of experts."""
    return {chosen.axes for name, chosen in plan.operators.items() if "expert_" in name}


def dropped(of: Case, ranks: int, own: int | None = None) -> list[int]:
    """How many rows of every expert have no place; own: of this rank alone."""
    ids = of.inputs["chosen"].reshape(-1)
    real = torch.where(kept_rows(ids, ranks, of.experts, FACTOR), -1, ids)
    real = real if own is None else real.chunk(ranks)[own]
    return torch.bincount(real[(real >= 0) & (real < of.experts)], minlength=of.experts).tolist()


@pytest.mark.exhaustive(sample=["{'ep': 4}", "dp_shard': 2, 'ep': 2}-skewed", "tp': 2}-skewed"])
@pytest.mark.parametrize(
    "kind", ["skewed", "one expert has all", "a rank without tokens", "some of no expert"]
)
@pytest.mark.parametrize("dims", [{"ep": 2}, {"ep": 4}, {"dp_shard": 2, "ep": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_loss_and_gradients_are_those_of_a_mixture_that_drops_alike(kind: str, dims: dict[str, int]) -> None:
    of = case(kind=kind, between="" if kind == "some of no expert" else "bias")
    ranks = math.prod(size for name, size in dims.items() if name != "tp")
    with counted_drops() as counted:
        found = run_plan(of.program, planned(of, **dims), of.tensors)
    assert worst(found, reference(of, ranks)) < 1e-12
    (rows,) = counted.values()
    copies = dims.get("tp", 1)
    assert rows[1].tolist() == [copies * count for count in dropped(of, ranks)]
    assert rows[1].sum() > 0
    ids = of.inputs["chosen"].reshape(-1)
    assert rows[0].sum() == copies * ((ids >= 0) & (ids < 8)).sum()


@pytest.mark.exhaustive(sample="8.0")
@pytest.mark.parametrize("factor", [0.01, 8.0])
def test_where_every_row_has_a_place_it_is_the_model(factor: float) -> None:
    of = case()
    found = run_plan(of.program, planned(of, factor, ep=4), of.tensors)
    assert worst(found, reference(of, 4, factor)) < 1e-12
    whole = run_plan(of.program, planned(of, None, ep=4), of.tensors)
    assert (worst(found, whole) < 1e-12) == (factor >= 8.0)


def by_hand(of: Case, *axes: str, shape: tuple[int, ...] = (2, 4)) -> tuple[Program, Plan]:
    """Products of experts split so, all else on every rank."""
    program, mesh = with_expert_capacity(of.program, FACTOR), Mesh(("outer", "inner")[-len(shape) :], shape)
    entries = picked(program, mesh, lambda node, rule: axes if rule.pairs else (None,) * len(shape))
    return program, hand_plan(program, mesh, entries)


@pytest.mark.parametrize(("experts", "ranks"), [(3, 2), (7, 4)])
def test_experts_that_do_not_divide(experts: int, ranks: int) -> None:
    of = case(experts)
    program, plan = by_hand(of, "t+e", shape=(ranks,))
    assert products(plan) == {("t+e",)}
    with counted_drops() as counted:
        found = run_plan(program, plan, of.tensors)
    assert worst(found, reference(of, ranks)) < 1e-12
    assert counted[""][1].tolist() == dropped(of, ranks) != [0] * experts


@pytest.mark.exhaustive(sample=["axes0", "axes1"])
@pytest.mark.parametrize(
    ("axes", "parts"), [(("e", "t+e"), 4), (("t+e", "t+e"), 8), (("t+e", "n"), 2), (("k", "t+e"), 4), (("t", "t+e"), 8)]
)
def test_rows_travel_beside_every_other_split(axes: tuple[str, str], parts: int) -> None:
    of = case()
    program, plan = by_hand(of, *axes)
    assert worst(run_plan(program, plan, of.tensors), reference(of, parts)) < 1e-12


@pytest.mark.parametrize(
    ("between", "behind"), [("norm", ""), ("penalty", "exp"), ("bias", "bias")]
)
def test_what_is_not_zero_of_zero_rows_runs_where_it_may(between: str, behind: str) -> None:
    """A norm makes NaN of an added row, a sum would count it, and what is added to a dropped row stays."""
    of = case(between=between, behind=behind)
    found = run_plan(of.program, planned(of, ep=4), of.tensors)
    assert worst(found, reference(of, 4)) < 1e-12


def test_an_operator_that_makes_nan_of_an_added_row_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One over the root of the mean square of zeros, which a gradient of zero is multiplied by."""
    norm = {"aten.rsqrt.default", "aten.pow.Tensor_Scalar"}
    monkeypatch.setattr(zero_rows, "_is_finite", lambda node: True)
    monkeypatch.setattr(zero_rows, "_FIRST", zero_rows._FIRST | norm)
    of = case(between="norm")
    with pytest.raises(AssertionError, match="an index is held by no rank"):  # what is NaN counts as held by none
        run_plan(of.program, planned(of, ep=4), of.tensors)


@pytest.mark.parametrize("spoiled", [0, 1])
def test_what_must_not_run_beside_products_would_be_noticed(spoiled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over rows that count added ones; results to which something was added."""
    of = case(between=("penalty", "bias")[spoiled], behind=("exp", "bias")[spoiled])
    monkeypatch.setattr(zero_rows._Zeros, "spoiled", lambda self: iter(()))
    found = run_plan(of.program, planned(of, ep=4), of.tensors)
    assert worst(found, reference(of, 4)) > 1e-3


@pytest.mark.parametrize("wrong", ["one place more", "one place less", "places of a rank", "order behind", "last rows"])
def test_what_goes_wrong_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, right = case(), capped_layer.CappedLayer._order
    wanted = reference(of, 4)
    plan = planned(of, ep=4)

    def order(self: capped_layer.CappedLayer, first: fx.Node) -> list[fx.Node]:
        if wrong.startswith("one place"):
            assert self._there.room is not None
            self._there = self._there._replace(room=self._there.room + (1 if "more" in wrong else -1))
        if wrong == "last rows":
            self._ids = turned(self, self._ids)
        found = right(self, first)
        if wrong == "last rows":
            found[1] = turned(self, found[1])
        if wrong == "order behind":
            order = self._by_row.stations[-1].order
            self._by_row.stations[-1] = Rows(order, order)
        if wrong == "places of a rank":
            found[1] = turned(self, found[1])
        return found

    def turned(self: capped_layer.CappedLayer, node: fx.Node) -> fx.Node:
        with self._graph.inserting_after(node):
            other = self._graph.call_function(torch.ops.aten.flip.default, (node, [0]))
        other.meta = dict(node.meta)
        return other

    monkeypatch.setattr(capped_layer.CappedLayer, "_order", order)
    assert worst(run_plan(of.program, plan, of.tensors), wanted) > 1e-3


def test_a_kernel_of_two_gradients_runs_between_products() -> None:
    of = case()
    fused = with_kernels(of.program, ("gated",))
    request = Request(cluster=Cluster.parse("4 cpu"), dims={"ep": 4}, ep="capacity", expert_capacity=FACTOR,
                      mode="fast", with_baselines=False)  # fmt: skip
    found = run_plan(fused, make_plan(fused, request), of.tensors)
    assert worst(found, reference(of, 4)) < 1e-12
    called = [str(node.target) for part in found.partitions for node in part.backward.graph.nodes]
    assert any("gated_backward" in name for name in called)
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    graphs = (found.partitions[0].forward.graph, found.partitions[0].backward.graph)
    sent = [node for graph in graphs for node in graph.find_nodes(op="call_function", target=exchange)]
    assert max(math.prod(node.meta["local_shape"][1:]) for node in sent) == WIDTH, "hidden rows stay"


def test_rows_are_counted_once_and_logged_per_step(tmp_path: Path) -> None:
    """Also where backward computes everything again."""
    of = case()
    plan = planned(of, ep=4)
    again = [name for name in plan.operators if not name.endswith("/bwd")]
    with StepLog(tmp_path / "run.jsonl", plan) as log:
        for recomputed in ([], again):
            with log.step():
                found = run_plan(of.program, plan, of.tensors, recompute=recomputed)
            assert worst(found, reference(of, 4)) < 1e-12
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    rows = torch.bincount(of.inputs["chosen"].reshape(-1), minlength=8).tolist()
    assert [line["expert_rows"] for line in lines] == [{"": rows}] * 2
    assert [line["dropped_rows"] for line in lines] == [{"": dropped(of, 4)}] * 2
    assert sum(dropped(of, 4)) > 0


def test_a_plan_for_another_batch_keeps_the_capacity() -> None:
    of = case()
    request = Request(cluster=Cluster.parse("4 cpu"), mode="fast")
    captured = CapturedModel(
        program=of.program, model=of.model, args=(), kwargs=dict(of.inputs), request=request, captures=Captures()
    )
    again = plan_again(of.program, request, planned(of, ep=4), captured)
    assert (again.expert_capacity, products(again)) == (FACTOR, {("t+e",)})


def test_every_message_is_as_long_and_no_counts_travel() -> None:
    of = case()
    step = lowering.lowered_step(of.program, planned(of, ep=4), 0, until=lowering.sort_rows)
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    found = list(step.stages[0].program.graph.find_nodes(op="call_function", target=exchange))
    places = math.ceil(FACTOR * ROWS / 4 / 8)
    there = 4 * 2 * places
    assert all(node.args[1] == node.args[2] == [2 * places] * 4 for node in found)
    assert sorted(node.meta["local_shape"] for node in found) == sorted(
        [(there,), (there, WIDTH), (there, WIDTH), (there, WIDTH), (there, WIDTH), (there, 1)]
    )


def test_kernels_are_compiled_and_graphs_recorded() -> None:
    """Nothing waits for the device, and no shape depends on values."""
    of = case()
    plan = planned(of, ep=4).with_(kernel_backend="inductor")
    parts = lowering.lowered_step(of.program, plan, 0).stages[0].partition
    assert parts.backward is not None
    for module in (parts.forward, parts.backward):
        assert not any(VARYING in node.meta or waits_for_values(node) for node in module.graph.nodes)
        graphs = [piece.graph_module.graph for piece in cut_into_pieces(module) if piece.compiled]
        compiled = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}
        assert any("silu" in name for name in compiled)


def test_all_ranks_cost_as_much_whatever_the_load() -> None:
    of = case()
    cluster = Cluster.parse("4 cpu")
    request = Request(cluster=cluster, dims={"ep": 4}, ep="capacity", mode="fast", with_baselines=False,
                      expert_capacity=1.0)  # fmt: skip
    skew: Mapping[str, tuple[int, ...]] = {"": (1, *[0] * 7)}
    one, skewed, two = (
        make_plan(of.program, asked)
        for asked in (request, replace(request, expert_load=skew), replace(request, expert_capacity=4.0))
    )
    assert skewed.objective_seconds == one.objective_seconds < two.objective_seconds
    assert skewed.predicted.step_seconds == one.predicted.step_seconds < two.predicted.step_seconds
    assert one.predicted.peak_bytes < two.predicted.peak_bytes

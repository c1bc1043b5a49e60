"""Rows that travel to the rank of their expert: loss and gradients as on one rank, whoever gets how many."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.errors import PlanMismatchError
from autopar.graphs.kernel_groups import kernel_groups
from autopar.graphs.node_values import VARYING, node_bytes
from autopar.graphs.rows_per_rank import busiest_part, fullest_part, sent_parts
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.ops import dispatch
from autopar.ops.dispatch import counted_rows
from autopar.passes.kernels import travelling_layer
from autopar.passes.kernels.compilable_pieces import cut_into_pieces
from autopar.passes.kernels.dispatched_layer import DispatchedLayer
from autopar.passes.kernels.travelling_layer import Rows as RowStation
from autopar.passes.kernels.travelling_layer import Tokens
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.passes.lowering import chain as lowering
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from autopar.runtime.collectives.progress import RankProgress
from autopar.runtime.step.replayed_graphs import waits_for_values
from tests.passes.hand_plans import hand_plan, picked, run_plan, tensors_of, worst

WIDTH, HIDDEN, CHOSEN, BATCH, TOKENS = 8, 12, 2, 8, 4
ROWS = BATCH * TOKENS * CHOSEN


class Chosen(nn.Module):
    """Gated experts with a bias over residuals; who goes where is an input: (B, S, D), (B, S, k), (B, S, k) -> loss."""

    def __init__(self, experts: int, with_bias: bool = True) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(experts, 2 * HIDDEN)) if with_bias else None

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        x = functional.silu(self.before(x))
        ids = chosen.reshape(-1)
        rows = x.unsqueeze(2).expand(-1, -1, CHOSEN, -1).reshape(-1, WIDTH)
        rows = torch.ops.autopar.expert_linear(rows, self.up, ids, False)
        if self.bias is not None:
            rows = rows + functional.embedding(ids, self.bias)
        gate, rows = rows.chunk(2, -1)
        rows = torch.ops.autopar.expert_linear(functional.silu(gate) * rows, self.down, ids, False)
        mixed = (rows * weights.reshape(-1, 1)).view(*x.shape[:2], CHOSEN, WIDTH).sum(2)
        return (x + mixed).square().mean(dim=(1, 2)).sum()


def routed(kind: str, experts: int) -> Tensor:
    """Experts of every token's choices."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(experts, (BATCH, TOKENS, CHOSEN), generator=generator)
    return {
        "even": ids,
        "one expert has all": torch.full_like(ids, experts - 1),
        "a rank without tokens": ids.clamp(max=experts // 2 - 1),
        "some of no expert": torch.where(ids == 1, experts + 3, ids) - (ids == 0).long(),
    }[kind]


def captured(
    experts: int, kind: str, with_bias: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Program, dict[str, Tensor]]:
    """The program and its tensors; dtype: of all but the weights of routing."""
    torch.manual_seed(0)
    module = Chosen(experts, with_bias).to(dtype)
    inputs = {
        "x": torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype),
        "weights": torch.rand(BATCH, TOKENS, CHOSEN, dtype=torch.float64),
        "chosen": routed(kind, experts),
    }
    program = capture(module, (), inputs)
    return program, tensors_of(program, module, inputs)


def planned(program: Program, copies: Sequence[int] = (), **dims: int) -> Plan:
    """The plan under named axes, with copies of some experts on every rank."""
    cluster = Cluster.parse(f"{torch.tensor(list(dims.values())).prod()} cpu")
    ep = "dispatch" if "ep" in dims else None
    request = Request(cluster=cluster, dims=dims, ep=ep, mode="fast", with_baselines=False)
    return make_plan(program, replace(request, replicated_experts={"": copies} if copies else None))


def products(plan: Plan) -> set[tuple[str | None, ...]]:
    """What the axes split of the products of experts."""
    return {chosen.axes for name, chosen in plan.operators.items() if "expert_" in name}


@pytest.mark.parametrize(
    "kind", ["even", "one expert has all", "a rank without tokens", "some of no expert"]
)
@pytest.mark.parametrize("dims", [{"ep": 2}, {"ep": 4}, {"dp_shard": 2, "ep": 2}], ids=str)
def test_loss_and_gradients_are_those_of_one_rank(kind: str, dims: dict[str, int]) -> None:
    program, tensors = captured(8, kind, with_bias=kind != "some of no expert")
    plan = planned(program, **dims)
    assert products(plan) == {("t",) * (len(dims) - 1) + ("t+e",)}
    assert worst(run_plan(program, plan, tensors), run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-13


@pytest.mark.parametrize(("experts", "ranks"), [(9, 2), (18, 4)])
def test_experts_that_do_not_divide(experts: int, ranks: int) -> None:
    program, tensors = captured(experts, "even")
    plan = planned(program, ep=ranks)
    assert products(plan) == {("t+e",)}
    assert worst(run_plan(program, plan, tensors), run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-13


def test_rows_are_counted_and_waited_for_once_where_backward_computes_again() -> None:
    program, tensors = captured(8, "even")
    plan = planned(program, ep=4)
    again = [name for name in plan.operators if not name.endswith("/bwd")]
    with counted_rows() as counted:
        found = run_plan(program, plan, tensors, recompute=again)
    assert sum(int(rows.sum()) for rows in counted[""]) == ROWS
    assert not any(map(waits_for_values, found.partitions[0].backward.graph.nodes))
    assert worst(found, run_plan(program, plan, tensors)) < 1e-13


def exchanges(program: Program, plan: Plan) -> list[fx.Node]:
    """What travels by all-to-all in a step of rank 0."""
    step = lowering.lowered_step(program, plan, 0, until=lowering.sort_rows)
    graph = step.stages[0].program.graph
    return list(graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_to_all_single.default))


def test_nothing_is_compiled_or_recorded_for_as_many_rows_as_come() -> None:
    """Kernels of inductor and CUDA graphs are made for one shape."""
    program, _ = captured(8, "even")
    plan = planned(program, ep=4).with_(kernel_backend="inductor")
    parts = lowering.lowered_step(program, plan, 0).stages[0].partition
    assert parts.backward is not None
    for module in (parts.forward, parts.backward):
        varying = {node.name for node in module.graph.nodes if VARYING in node.meta and node.op == "call_function"}
        products = {node.name for node in module.graph.nodes if "sorted_expert" in str(node.target)}
        assert products <= varying, "what runs between the products does, too"
        pieces = cut_into_pieces(module)
        assert any(piece.compiled for piece in pieces)
        graphs = [piece.graph_module.graph for piece in pieces if piece.compiled]
        compiled = {node.name for graph in graphs for node in graph.nodes if node.op == "call_function"}
        assert compiled & varying == set()
        groups = kernel_groups(module.graph, "inductor")
        assert all([*groups.values()].count(groups[node]) == 1 for node in groups if node.name in varying)
    assert any(map(waits_for_values, parts.forward.graph.nodes))


def test_memory_is_planned_for_more_rows_than_the_busiest_rank_expects() -> None:
    program, _ = captured(8, "even")
    found = next(node for node in exchanges(program, planned(program, ep=4)) if WIDTH in node.meta["local_shape"][1:])
    there, planned_for = (part((1 / 8,) * 8, 4, ROWS) for part in (busiest_part, fullest_part))
    assert node_bytes(found) == pytest.approx(ROWS * planned_for * WIDTH * 8, rel=0.03)
    assert planned_for > 1.1 * there


def test_more_rows_than_memory_is_planned_for_are_named_where_it_runs_out() -> None:
    program, tensors = captured(8, "one expert has all")
    plan = planned(program, ep=4)
    dispatch._most.clear()
    run_plan(program, plan, tensors)
    with pytest.raises(torch.OutOfMemoryError) as raised, RankProgress().inside("call", 1):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert re.search(f": {ROWS} for .*expert_load='run.jsonl'", raised.value.__notes__[0])
    dispatch._most.clear()
    run_plan(program, plan, {**tensors, "chosen": torch.arange(ROWS).view_as(tensors["chosen"]) % 8})
    assert dispatch.beyond_memory() == ""


@pytest.fixture
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token travels in place of its rows."""
    monkeypatch.setattr(travelling_layer, "once_per_rank", lambda *routed: None)


def test_a_token_travels_once_to_a_rank_and_comes_back_as_one_sum() -> None:
    program, _ = captured(8, "even")
    found = [node.meta["local_shape"] for node in exchanges(program, planned(program, ep=2))]
    rows, part = ROWS // 2, 2 * sum(sent_parts((1 / 8,) * 8, (), 2, CHOSEN)) / 2
    assert part == pytest.approx(1 - 6 / 28), "two of the other four: 6 of 28 sets of two experts"
    there = math.ceil(ROWS * busiest_part((1 / 8,) * 8, 2, ROWS))
    home, came = math.ceil(part * rows), math.ceil(part * there)
    assert sorted(shape for shape in found if len(shape) == 2) == sorted(
        [(came, WIDTH), (home, WIDTH)] * 2 + [(there, 1)]
    )
    assert (2 * (4 + 1 + 1),) in found, "counts, and how many tokens"


@pytest.mark.parametrize("kind", ["even", "one expert has all", "a rank without tokens", "some of no expert"])
def test_rows_alone_travel_as_well(kind: str, rows_alone: None) -> None:
    program, tensors = captured(8, kind, with_bias=kind != "some of no expert")
    plan = planned(program, ep=4)
    assert worst(run_plan(program, plan, tensors), run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-13


class Rows(nn.Module):
    """Rows of experts as they are, beside sums over those of a token: two readers of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.unsqueeze(2).expand(-1, -1, CHOSEN, -1).reshape(-1, WIDTH)
        rows = torch.ops.autopar.expert_linear(rows, self.up, chosen.reshape(-1), False)
        return rows.view(*x.shape[:2], CHOSEN, WIDTH).sum(2).square().mean(dim=(1, 2)).sum(), rows


def test_rows_that_are_returned_come_back_beside_sums_of_tokens() -> None:
    torch.manual_seed(0)
    module = Rows().double()
    inputs = {"x": torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64), "chosen": routed("even", 8)}
    program = capture(module, (), inputs)
    tensors, plan = tensors_of(program, module, inputs), planned(program, ep=2)
    assert any("token_pairs" in str(node.target) for node in lowering.lowered_step(
        program, plan, 0, until=lowering.sort_rows).stages[0].program.graph.nodes)  # fmt: skip
    assert worst(run_plan(program, plan, tensors), run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-13


def spoil_tokens(wrong: str, station: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a station other tokens are sent, or those that come back are added to others."""
    order, summed = DispatchedLayer._order, DispatchedLayer._summed

    def turned(self: DispatchedLayer, tokens: Tokens) -> Tokens:
        with self._graph.inserting_after(tokens.token):
            flipped = self._graph.call_function(torch.ops.aten.flip.default, (tokens.token, [0]))
        flipped.meta = dict(tokens.token.meta)
        return tokens._replace(token=flipped)

    def other_order(self: DispatchedLayer, first: fx.Node) -> list[fx.Node]:
        found, stations = order(self, first), self._by_token.stations
        stations[station] = turned(self, stations[station])
        return found

    def other_sums(self: DispatchedLayer, rows: fx.Node, by: Tokens, *more: Any) -> fx.Node:
        return summed(self, rows, turned(self, by) if by is self._by_token.stations[station] else by, *more)

    if wrong == "sent":
        monkeypatch.setattr(DispatchedLayer, "_order", other_order)
    else:
        monkeypatch.setattr(DispatchedLayer, "_summed", other_sums)


@pytest.mark.parametrize("wrong", ["sent", "summed"])
@pytest.mark.parametrize("station", [0, -1])
def test_wrong_tokens_are_noticed(wrong: str, station: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, tensors = captured(8, "even")
    wanted = run_plan(program, planned(program, dp_shard=1), tensors)
    spoil_tokens(wrong, station, monkeypatch)
    assert worst(run_plan(program, planned(program, ep=2), tensors), wanted) > 1e-3


def test_rows_travel_once_each_way_and_pass(rows_alone: None) -> None:
    program, _ = captured(8, "even")
    found = exchanges(program, planned(program, ep=4))
    home, there = ROWS // 4, math.ceil(ROWS * busiest_part((1 / 8,) * 8, 4, ROWS))
    assert there > home
    assert sorted(node.meta["local_shape"] for node in found) == sorted([
        (4 * 3,), (there,),  # how many rows go where, and the ids of biases
        (there, WIDTH), (home, WIDTH),  # there and back
        (there, WIDTH), (home, WIDTH),  # so do gradients; routing weights stay at home
    ])  # fmt: skip


@pytest.mark.parametrize("dims", [{"ep": 4}, {"dp_shard": 2, "ep": 2}], ids=str)
def test_a_kernel_of_two_gradients_between_products_runs_where_the_experts_are(dims: dict[str, int]) -> None:
    program, tensors = captured(8, "even")
    fused = with_kernels(program, ("gated",))
    assert any("gated_backward" in str(node.target) for node in fused.graph.nodes)
    plan = planned(fused, **dims)
    widths = [node.meta["local_shape"][1:] for node in exchanges(fused, plan)]
    assert sorted(widths) == [(), (), (), (1,), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,)], "hidden rows stay"
    assert worst(run_plan(fused, plan, tensors), run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-13


def test_rows_come_back_before_weights_of_routing_make_them_wider(rows_alone: None) -> None:
    program, tensors = captured(8, "even", dtype=torch.float32)
    plan = planned(program, ep=4)
    back = [node for node in exchanges(program, plan) if node.meta["local_shape"] == (ROWS // 4, WIDTH)]
    assert [node.meta["dtype"] for node in back] == [torch.float32, torch.float32]
    assert worst(run_plan(program, plan, tensors), run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-5


@pytest.mark.parametrize("wrong", ["order of a rank", "order behind the exchange", "weights of another expert"])
def test_what_goes_wrong_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch, rows_alone: None) -> None:
    program, tensors = captured(8, "even")
    wanted = run_plan(program, planned(program, dp_shard=1), tensors)
    right = DispatchedLayer._order

    def order(self: DispatchedLayer, first: fx.Node) -> list[fx.Node]:
        found = right(self, first)
        if wrong == "order behind the exchange":
            order = self._by_row.stations[-1].order
            self._by_row.stations[-1] = RowStation(order, order)
        if wrong == "weights of another expert":
            with self._graph.inserting_after(found[2]):
                turned = self._graph.call_function(torch.ops.aten.flip.default, (found[2], [0]))
            turned.meta = dict(found[2].meta)
            found[2] = turned
        if wrong == "order of a rank":
            found[1] = found[0]
        return found

    monkeypatch.setattr(DispatchedLayer, "_order", order)
    assert worst(run_plan(program, planned(program, ep=4), tensors), wanted) > 1e-3


@pytest.mark.parametrize("kind", ["even", "one expert has all", "a rank without tokens"])
@pytest.mark.parametrize("dims", [{"ep": 2}, {"ep": 4}, {"dp_shard": 2, "ep": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_rows_of_replicated_experts_stay_and_all_gradients_arrive(kind: str, dims: dict[str, int]) -> None:
    program, tensors = captured(8, kind)
    plan = planned(program, (0, 3, 7), **dims)
    assert plan.replicated_experts == {"": (0, 3, 7)}
    assert all("t+e" in axes for axes in products(plan))
    assert worst(run_plan(program, plan, tensors), run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-13


def test_experts_that_do_not_divide_and_are_replicated() -> None:
    """The last rank has fewer: its copies lie right behind its own."""
    program, tensors = captured(18, "even")
    plan = planned(program, (1, 16, 17), ep=4)
    assert worst(run_plan(program, plan, tensors), run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-13


def test_rows_of_replicated_experts_are_counted_like_all_others() -> None:
    program, tensors = captured(8, "even")
    with counted_rows() as counter:
        run_plan(program, planned(program, (0, 3, 7), ep=4), tensors)
    found = torch.stack(counter[""]).sum(0)
    assert found.tolist() == tensors["chosen"].flatten().bincount(minlength=8).tolist()


@pytest.mark.parametrize("wrong", ["another expert", "gradients of one rank"])
def test_wrong_copies_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, tensors = captured(8, "even")
    wanted = run_plan(program, planned(program, dp_shard=1), tensors)
    right = DispatchedLayer._collective

    def collective(self: DispatchedLayer, target: object, args: tuple[Any, ...], *more: Any) -> fx.Node:
        if target is torch.ops._c10d_functional.all_reduce.default:
            of_weight = args[0].target is dispatch.replicas_held
            if wrong == "another expert" and of_weight:
                args[0].args = (args[0].args[0], [*args[0].args[1][1:], -1])
            if wrong == "gradients of one rank" and not of_weight:
                return args[0]  # type: ignore[no-any-return]
        return right(self, target, args, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(DispatchedLayer, "_collective", collective)
    assert worst(run_plan(program, planned(program, (0, 3, 7), ep=4), tensors), wanted) > 1e-3


def split_by_hand(program: Program, *axes: str) -> Plan:
    """Products of experts split so over a 2 x 4 mesh, all else on every rank."""
    mesh = Mesh(("outer", "inner"), (2, 4))
    return hand_plan(program, mesh, picked(program, mesh, lambda node, rule: axes if rule.pairs else (None, None)))


@pytest.mark.parametrize(
    "axes", [("e", "t+e"), ("t+e", "t+e"), ("t+e", "n"), ("k", "t+e"), ("t", "t+e")], ids=" x ".join
)
@pytest.mark.parametrize("copies", [(), (1, 6)], ids=str)
def test_rows_travel_beside_every_other_split(copies: Sequence[int], axes: tuple[str, str]) -> None:
    program, tensors = captured(8, "even")
    wanted = run_plan(program, planned(program, dp_shard=1), tensors)
    plan = split_by_hand(program, *axes).with_(replicated_experts={"": copies} if copies else {})
    assert worst(run_plan(program, plan, tensors), wanted) < 1e-13


def test_ranges_apart_are_refused() -> None:
    program, tensors = captured(8, "even")
    with pytest.raises(PlanMismatchError, match="axis 'inner' behind it must not split 'e' alone"):
        run_plan(program, split_by_hand(program, "t+e", "e"), tensors)


def test_a_skewed_load_costs_what_the_busiest_rank_does_and_computes_the_same() -> None:
    program, tensors = captured(8, "one expert has all")
    cluster = Cluster.parse("4 cpu")
    request = Request(
        cluster=cluster, dims={"ep": 4}, ep="dispatch", mode="fast", with_baselines=False, replicated_experts=0
    )
    even, skewed = (make_plan(program, replace(request, expert_load=load)) for load in (None, {"": (1,) + (0,) * 7}))
    assert products(even) == products(skewed) == {("t+e",)}
    assert skewed.objective_seconds > even.objective_seconds
    assert (ROWS // CHOSEN, WIDTH) in {n.meta["local_shape"] for n in exchanges(program, skewed)}, "each token once"
    assert worst(run_plan(program, skewed, tensors), run_plan(program, even, tensors)) < 1e-13

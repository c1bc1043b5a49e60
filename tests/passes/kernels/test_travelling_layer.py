"""Rows that travel in two hops, once to every node and then inside of it: loss and gradients as on one rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.cost_models.program_costs import collective_of
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.ops import dispatch
from autopar.passes.kernels import travelling_layer
from autopar.passes.kernels.dispatched_layer import DispatchedLayer
from autopar.passes.kernels.travelling_layer import Rows
from autopar.passes.lowering.checks import NOT_WITHOUT_VALUES
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import expert_way
from autopar.program import Program
from autopar.request import Request
from benchmarks.netlab.pipelines import traffic
from tests import simulated_ranks
from tests.passes.hand_plans import Results, run_plan, tensors_of, worst
from tests.passes.kernels.test_dispatched_rows import CHOSEN, WIDTH, Chosen, captured, spoil_tokens

CASES = [
    ("even", "2x2", (1, 6), CHOSEN), ("one expert has all", "2x2", (), CHOSEN),
    ("a rank without tokens", "4x2", (0, 3, 7), CHOSEN), ("some of no expert", "2x2", (2,), CHOSEN),
    ("a rank without tokens", "2x2", (), 1), ("even", "2x2", (0,), 1),
]  # fmt: skip
"""Routing, nodes, replicated experts, and how many rows of a token may go as one."""


def planned(program: Program, nodes: str, ep: str = "two_level", **asked: Any) -> Plan:
    """Experts over all devices of so many nodes."""
    cluster = Cluster.parse(f"{nodes} cpu")
    request = Request(
        cluster=cluster, dims={"ep": cluster.num_devices}, ep=ep, mode="fast", with_baselines=False, **asked  # type: ignore[arg-type]
    )
    return make_plan(program, request)


@cache
def alone(kind: str) -> tuple[Program, Mapping[str, Tensor], Results]:
    """A program, its inputs, and what one rank makes of them."""
    program, tensors = captured(8, kind, with_bias=kind != "some of no expert")
    request = Request(cluster=Cluster.parse("1 cpu"), mode="fast", with_baselines=False)
    return program, tensors, run_plan(program, make_plan(program, request), tensors)


@pytest.mark.parametrize(("kind", "nodes", "copies", "each"), CASES)
def test_two_hops_compute_what_one_rank_does(
    kind: str, nodes: str, copies: Sequence[int], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if each == 1:  # rows alone, no token in their place
        monkeypatch.setattr(travelling_layer, "once_per_rank", lambda *routed: None)
    program, tensors, wanted = alone(kind)
    plan = planned(program, nodes, replicated_experts={"": copies} if copies else None)
    assert (expert_way(plan), plan.mesh) == ("two_level", Mesh(("ep", "ep_inner"), (int(nodes[0]), int(nodes[2]))))
    assert worst(run_plan(program, plan, tensors), wanted) < 1e-12


class Routed(nn.Module):
    """Gated experts with their router: softmax over those chosen, as Mixtral has it; or, as DeepSeek-V3, sigmoids, of
    which the best two of four groups compete, beside an expert that every token has."""

    def __init__(self, experts: int, chosen: int, groups: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, WIDTH) / 2)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(experts, 12, WIDTH) / 4)
        self.shared = nn.Linear(WIDTH, WIDTH) if groups > 1 else None
        self.chosen, self.groups = chosen, groups

    def forward(self, x: Tensor) -> Tensor:
        scores = functional.linear(x, self.router)
        if self.groups > 1:
            scores = scores.sigmoid()
            in_groups = scores.unflatten(-1, (self.groups, -1))
            best = in_groups.topk(2, -1)[0].sum(-1).topk(2, -1)[1]
            allowed = functional.one_hot(best, self.groups).sum(-2).unsqueeze(-1).expand_as(in_groups).flatten(-2)
            ids = scores.detach().masked_fill(allowed == 0, 0.0).topk(self.chosen, -1)[1]
            weights = scores.gather(-1, ids)
            weights = weights / weights.sum(-1, keepdim=True)
        else:
            values, ids = scores.topk(self.chosen, -1)
            weights = values.softmax(-1)
        rows = x.unsqueeze(2).expand(-1, -1, self.chosen, -1).flatten(0, 2)
        gate, rows = torch.ops.autopar.expert_linear(rows, self.up, ids.flatten(), False).chunk(2, -1)
        rows = torch.ops.autopar.expert_linear(functional.silu(gate) * rows, self.down, ids.flatten(), False)
        mixed = (rows * weights.reshape(-1, 1)).view(*x.shape[:2], self.chosen, WIDTH).sum(2)
        mixed = mixed if self.shared is None else mixed + self.shared(x)
        return (x + mixed).square().mean(dim=(1, 2)).sum()


@pytest.mark.parametrize(
    ("nodes", "experts", "chosen", "groups"), [("2x2", 8, 2, 1), ("2x4", 16, 4, 4)], ids=["mixtral", "deepseek-v3"]
)
def test_models_with_their_routers_agree_with_one_device(nodes: str, experts: int, chosen: int, groups: int) -> None:
    torch.manual_seed(2)
    module, x = Routed(experts, chosen, groups).double(), torch.randn(8, 4, WIDTH, dtype=torch.float64)
    program = capture(module, (), {"x": x})
    plan = planned(program, nodes)
    assert expert_way(plan) == "two_level"
    found = run_plan(program, plan, tensors_of(program, module, {"x": x}))
    module(x).backward()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert set(found.gradients) == set(wanted)
    for name, gradient in wanted.items():
        assert gradient is not None
        assert float((found.gradients[name] - gradient).norm() / gradient.norm()) < 1e-12, name
    assert next(iter(found.outputs.values())).item() == pytest.approx(module(x).item(), rel=1e-12)


def test_two_hops_give_equal_bits_again() -> None:
    program, tensors, _ = alone("even")
    plan = planned(program, "2x2")
    found, again = (run_plan(program, plan, tensors) for _ in range(2))
    assert all(torch.equal(value, again.gradients[name]) for name, value in found.gradients.items())


@pytest.mark.parametrize("wrong", ["sent", "summed"])
def test_wrong_tokens_between_the_hops_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, tensors, wanted = alone("even")
    spoil_tokens(wrong, 1, monkeypatch)
    assert worst(run_plan(program, planned(program, "2x2"), tensors), wanted) > 1e-3


def test_a_wrong_way_back_between_the_hops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program, tensors, wanted = alone("even")
    monkeypatch.setattr(travelling_layer, "once_per_rank", lambda *routed: None)
    right = DispatchedLayer._order

    def order(self: DispatchedLayer, first: fx.Node) -> list[fx.Node]:
        found, stations = right(self, first), self._by_row.stations
        stations[1] = Rows(stations[1].order, stations[1].order)
        return found

    monkeypatch.setattr(DispatchedLayer, "_order", order)
    assert worst(run_plan(program, planned(program, "2x2"), tensors), wanted) > 1e-3


def test_a_row_lost_between_the_hops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken for one of no expert."""
    program, tensors, wanted = alone("even")

    def lossy(table: Tensor, sizes: Tensor, ranks: int) -> Tensor:
        found = dispatch.experts_that_came(table, sizes, ranks)
        found[:1] = table.numel() // ranks - 1
        return found

    names = SimpleNamespace(**{**vars(dispatch), "experts_that_came": lossy})
    monkeypatch.setattr(travelling_layer, "dispatch", names)
    monkeypatch.setitem(NOT_WITHOUT_VALUES, lossy, "as what it spoils")  # type: ignore[arg-type]
    assert worst(run_plan(program, planned(program, "2x2"), tensors), wanted) > 1e-3


def every_set(odds: Sequence[int]) -> tuple[Program, Mapping[str, Tensor], list[float]]:
    """Tokens of four ranks, each of which chooses every pair of experts as often as the product of their odds says;
    and what part of the rows every expert has."""
    sets = itertools.combinations(range(len(odds)), CHOSEN)
    own = [chosen for chosen in sets for _ in range(math.prod(odds[one] for one in chosen))]
    torch.manual_seed(0)
    module = Chosen(len(odds)).double()
    inputs = {
        "x": torch.randn(4, len(own), WIDTH, dtype=torch.float64),
        "weights": torch.rand(4, len(own), CHOSEN, dtype=torch.float64),
        "chosen": torch.tensor(own).expand(4, -1, -1).contiguous(),
    }
    program = capture(module, (), inputs)
    rows = inputs["chosen"].flatten().bincount(minlength=len(odds)).double()
    return program, tensors_of(program, module, inputs), (rows / rows.sum()).tolist()


def counted_links(program: Program, plan: Plan, tensors: Mapping[str, Tensor], per_node: int) -> list[list[float]]:
    """Bytes [from][to] between nodes of what ranks send by all-to-all in a step."""
    nodes = plan.mesh.size // per_node
    links, meet = [[0.0] * nodes for _ in range(nodes)], simulated_ranks._meet

    def counting(waiting: Mapping[int, simulated_ranks.Meeting], mesh: Mesh) -> Iterator[tuple[int, Any]]:
        answers = dict(meet(waiting, mesh))  # type: ignore[arg-type]
        for rank in answers:
            if collective_of(waiting[rank].node) == "all_to_all":
                count(rank, waiting[rank])
        yield from answers.items()

    def count(rank: int, meeting: simulated_ranks.Meeting) -> None:
        axes = [plan.mesh.axis_names.index(name) for name in meeting.group.split("+")]
        row_bytes = math.prod(meeting.tensor.shape[1:]) * meeting.tensor.element_size()
        peers = traffic._group(plan.mesh, axes, rank)
        for peer, rows in zip(peers, meeting.arguments[1], strict=True):
            links[rank // per_node][peer // per_node] += rows * row_bytes * (peer // per_node != rank // per_node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_ranks, "_meet", counting)
        run_plan(program, plan, tensors)
    return links


@pytest.mark.parametrize("odds", [(1,) * 8, (3, 2, 1, 1, 1, 1, 1, 2)], ids=["even", "skewed"])
def test_links_carry_what_is_predicted_and_less_than_in_one_hop(
    odds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, tensors, shares = every_set(odds)
    monkeypatch.setattr(
        traffic, "collective_of", lambda node: kind if (kind := collective_of(node)) == "all_to_all" else None
    )
    sent = {}
    for ep in ("two_level", "dispatch") if len({*odds}) == 1 else ("two_level",):
        plan = planned(program, "2x2", ep, expert_load={"": shares}, replicated_experts=0)
        counted = counted_links(program, plan, tensors, 2)
        predicted = traffic.link_bytes(program, plan, Cluster.parse("2x2 cpu"))
        for found, said in zip(itertools.chain(*counted), itertools.chain(*predicted), strict=True):
            assert found == pytest.approx(said, rel=0.01)
        sent[ep] = sum(map(sum, counted))
    if "dispatch" in sent:  # 22 of 28 pairs of experts have one on the other node, 13 on each of its ranks
        assert sent["two_level"] / sent["dispatch"] == pytest.approx(22 / 26, abs=0.03)

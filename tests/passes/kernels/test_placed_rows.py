"""Experts that a plan places: rows find them, their parameters are known, what cannot be placed is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import PlanMismatchError
from autopar.graphs.expert_loads import with_expert_load
from autopar.layouts.placement import Mesh, Replicate, Shard, in_order, local_runs
from autopar.ops.capped_rows import counted_drops
from autopar.ops.dispatch import counted_rows
from autopar.passes.kernels import placed_rows
from autopar.passes.lowering import chain as lowering
from autopar.passes.lowering.check_plan import refuse_unknown_names
from autopar.passes.lowering.placed_experts import as_held, placed_weights
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from tests.passes.hand_plans import Results, run_plan, worst
from tests.passes.kernels.test_dispatched_rows import CHOSEN, WIDTH, captured, planned

ORDER = (1, 5, 0, 3, 6, 7, 2, 4)


def in_place(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of parameters as ranks hold them."""
    return {name: value[list(ORDER)] if name in ("up", "down") else value for name, value in tensors.items()}


def of_the_model(found: Results) -> Results:
    """Gradients of what ranks hold, as the model's."""
    for name in ("up", "down"):
        found.gradients[name] = torch.empty_like(found.gradients[name]).index_copy_(
            0, torch.tensor(ORDER), found.gradients[name]
        )
    return found


def run_placed(program: Program, plan: Plan, tensors: dict[str, Tensor]) -> Results:
    return of_the_model(run_plan(program, plan.with_(expert_order={"": ORDER}), in_place(tensors)))


@cache
def case(kind: str = "even", with_bias: bool = True) -> tuple[Program, dict[str, Tensor], Results]:
    """With loss and gradients of one rank."""
    program, tensors = captured(8, kind, with_bias)
    return program, tensors, run_plan(program, planned(program, dp_shard=1), tensors)


@cache
def over_four(kind: str = "even", with_bias: bool = True) -> Plan:
    return planned(case(kind, with_bias)[0], ep=4)


@pytest.mark.parametrize(
    ("kind", "dims", "copies"),
    [
        ("even", {"ep": 4}, (0, 3, 7)),
        ("a rank without tokens", {"ep": 2, "tp": 2}, ()),
        ("even", {"dp_shard": 2, "ep": 2}, ()),
    ],
)
def test_loss_gradients_and_counts_are_the_models(kind: str, dims: dict[str, int], copies: tuple[int, ...]) -> None:
    program, tensors, wanted = case(kind)
    with counted_rows() as counted:
        found = run_placed(program, planned(program, copies, **dims), tensors)
    assert worst(found, wanted) < 1e-13
    rows = torch.bincount(tensors["chosen"].reshape(-1), minlength=8)
    assert torch.equal(torch.stack(counted[""]).sum(0), rows * (2 if "tp" in dims else 1))


def test_rows_of_no_expert_and_chunks_and_gathered_weights() -> None:
    program, tensors, wanted = case("some of no expert", with_bias=False)
    plan = over_four("some of no expert", with_bias=False)
    assert worst(run_placed(program, plan, tensors), wanted) < 1e-13
    assert worst(run_placed(program, plan.with_(product_chunks={"all_to_all": 2}), tensors), wanted) < 1e-13


def test_a_capacity_drops_the_same_rows() -> None:
    (program, tensors, _), plan = case("even", with_bias=False), over_four("even", with_bias=False)
    capped = plan.with_(question={**plan.question, "ep": "capacity", "expert_capacity": 0.75})
    with counted_drops() as drops:
        wanted = run_plan(program, capped, tensors)
    with counted_drops() as placed:
        assert worst(run_placed(program, capped, tensors), wanted) < 1e-13
    assert torch.equal(drops[""], placed[""])
    assert drops[""][1].any()


@pytest.mark.parametrize("wrong", ["places", "weights"])
def test_another_order_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (program, tensors, wanted), plan = case(), over_four()
    if wrong == "places":
        monkeypatch.setattr(placed_rows, "places_of", tuple)
        assert worst(run_placed(program, plan, tensors), wanted) > 1e-2
    else:
        placed = run_plan(program, plan.with_(expert_order={"": ORDER}), tensors)
        assert worst(of_the_model(placed), wanted) > 1e-2


def test_products_carry_what_is_said_of_experts_where_they_lie() -> None:
    program = case()[0]
    shares = tuple((i + 1) / 36 for i in range(8))
    said = with_expert_load(program, {"": shares}, {"": (0, 6)}, {"": ORDER})
    product = next(node for node in said.graph.nodes if "expert_linear" in str(node.target))
    assert product.meta["expert_load"] == tuple(shares[expert] for expert in ORDER)
    assert product.meta["replicated_experts"] == (2, 4)


def test_parameters_lie_in_the_order_and_what_is_looked_up_does_not() -> None:
    program = case()[0]
    assert placed_weights(program, "") == ("up", "down")
    plan = planned(program, dp_shard=2, ep=2).with_(expert_order={"": ORDER})
    held = as_held(plan, program)
    assert {name for name, each in held.parameters.items() if each != plan.parameters[name]} == {"up", "down"}
    assert str(held.parameters["up"].stored[1]) == "S(0, order=1-5-0-3-6-7-2-4)"
    assert as_held(plan.with_(expert_order={}), program).parameters == plan.parameters


def test_runs_of_an_order_are_those_of_the_block() -> None:
    mesh = Mesh(("a", "b"), (2, 2))
    nested = in_order((Shard(0), Shard(0)), 0, ORDER)
    assert [local_runs(8, nested, 0, mesh, (a, b)) for a in (0, 1) for b in (0, 1)] == [
        ((1, 1), (5, 1)), ((0, 1), (3, 1)), ((6, 2),), ((2, 1), (4, 1))
    ]  # fmt: skip
    assert local_runs(8, in_order((Replicate(), Shard(1)), 0, ORDER), 0, mesh, (0, 0)) == ((0, 8),)


class Other(nn.Module):
    """Experts with another reader, of parameters of their own, or too few for the ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, shape = kind, (8, WIDTH, WIDTH)
        self.ups = nn.ParameterList(torch.randn(shape[1:]) for _ in range(8))
        self.up = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows = x.unsqueeze(2).expand(-1, -1, CHOSEN, -1).reshape(-1, WIDTH)
        up = torch.stack(list(self.ups)) if self.kind == "stacked" else self.up.tanh().transpose(1, 2)
        rows = torch.ops.autopar.expert_linear(rows, up, chosen.reshape(-1), False)
        loss = rows.view(x.shape[0], -1).square().mean(1).sum()
        return loss + self.up[0].sum() if self.kind == "first" else loss


def other(kind: str) -> Program:
    torch.manual_seed(0)
    return capture(Other(kind).double(), (), {
        "x": torch.randn(8, 4, WIDTH, dtype=torch.float64), "chosen": torch.randint(8, (8, 4, CHOSEN))
    })  # fmt: skip


def test_what_cannot_be_placed_is_refused_with_the_reason() -> None:
    assert placed_weights(other("plain"), "") == ("up",), "through casts, views and what treats experts alike"
    for kind, why in (("first", "is read by .* too"), ("stacked", "no dim of one parameter")):
        with pytest.raises(PlanMismatchError, match=why):
            placed_weights(other(kind), "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda plan: {"expert_order": {"nowhere": ORDER}}, "no experts there"),
        (lambda plan: {"expert_order": {"": (1, 0)}}, "has 2 experts, the model 8"),
        (lambda plan: {"parameters": {**plan.parameters, "up": replace(plan.parameters["up"], stored=(Replicate(),))}},
         "every rank has every expert"),
        (lambda plan: {"mesh": Mesh(("ep",), (3,))}, "8 experts do not divide"),
    ],
)  # fmt: skip
def test_plans_that_cannot_place_are_refused(change: Callable[[Plan], dict[str, Any]], why: str) -> None:
    program, plan = case()[0], over_four().with_(expert_order={"": ORDER})
    with pytest.raises(PlanMismatchError, match=why):
        refuse_unknown_names(plan.with_(**change(plan)), program)


def test_ids_of_a_layer_are_placed_once() -> None:
    program, plan = case()[0], over_four().with_(expert_order={"": ORDER})
    graph = lowering.lowered_step(program, plan, 0, until=lowering.sort_rows).only.program.graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.autopar.placed_ids.default)) == 1

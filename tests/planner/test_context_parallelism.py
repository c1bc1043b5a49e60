"""Context parallelism: an axis cp splits the sequence of whole models, as a ring, as Ulysses, or with keys gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.capture import capture
from autopar.cost_models.program_costs import collective_of
from autopar.errors import ConfigurationError
from autopar.graphs.collective_nodes import HOP
from autopar.layouts.placement import Mesh, Shard
from autopar.passes.implementations import attention_ring
from autopar.passes.lowering import emit_redistribution
from autopar.passes.lowering.chain import lowered_step
from autopar.planner.problem.axis_presets import orders_offered
from autopar.planner.problem.strategies import AxisChoice
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from tests.passes.hand_plans import Results, run_plan, tensors_of, worst

TOKENS = 32
TOLERANCE = 1e-6
"""Norms and loss of the model count in fp32."""
RING = ("ring", ("s",))
CONTIGUOUS = {"*/attention#0": "S(2)"}


class Llama(nn.Module):
    """Grouped queries, rotary embeddings, tied to nothing."""

    def __init__(self, key_heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        shape = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=key_heads, vocab_size=64, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(shape)

    def forward(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids, labels=ids).loss


def _case(
    key_heads: int = 2, length: int = TOKENS, layers: int = 2
) -> tuple[nn.Module, Program, Mapping[str, Tensor]]:
    torch.manual_seed(0)
    model = Llama(key_heads, layers).double()
    ids = torch.randint(0, 64, (2, length))
    return model, capture(model, (ids,), {}), {"args.0": ids}


def _plan(model: nn.Module, ids: Tensor, **asked: Any) -> Plan:
    return autopar.plan(model, (ids,), mode="fast", with_baselines=False, **asked)


def _attention(plan: Plan) -> set[tuple[str, tuple[str | None, ...]]]:
    """Ways and the dims that they split; an axis cp that is cut in two at the same price counts as one."""
    return {
        (chosen.implementation, tuple(dict.fromkeys(chosen.axes)))
        for name, chosen in plan.operators.items()
        if "/attention#" in name
    }


def _orders(plan: Plan) -> set[bool]:
    """Whether queries of attention lie in zigzag order."""
    placements = (chosen.inputs[0][0] for name, chosen in plan.operators.items() if name.endswith("/attention#0"))
    return {isinstance(placed, Shard) and placed.zigzag for placed in placements}


@pytest.mark.exhaustive(sample=["ring-2-2", "ring-4-2", "ulysses-2-2"])
@pytest.mark.parametrize(
    ("cp", "ranks", "key_heads", "split", "zigzag"),
    [("ring", 4, 2, RING, False), ("ring", 2, 2, RING, True), ("ring", 4, 1, RING, True), ("ring", 8, 4, RING, True),
     ("gather", 4, 2, ("default", ("s",)), True), ("ulysses", 2, 2, ("default", ("h",)), False),
     ("ulysses", 4, 4, ("default", ("h",)), False)],
)  # fmt: skip
def test_every_way_equals_one_device(
    cp: str, ranks: int, key_heads: int, split: tuple[str, tuple[str, ...]], zigzag: bool
) -> None:
    model, program, inputs = _case(key_heads)
    pinned = {"*/attention#0": "S(2, zigzag)"} if zigzag else None
    plan = _plan(model, inputs["args.0"], cluster=f"{ranks} cpu", dims={"cp": ranks}, cp=cp, constraints=pinned)
    assert _attention(plan) == {split}
    assert _orders(plan) == {zigzag}
    assert _difference(model, program, inputs, plan) < TOLERANCE


def _difference(model: nn.Module, program: Program, inputs: Mapping[str, Tensor], plan: Plan) -> float:
    """Of loss and gradients, against one rank."""
    tensors = tensors_of(program, model, inputs)
    whole = _plan(model, inputs["args.0"], cluster="1 cpu", mesh=(1,))
    return worst(run_plan(program, plan, tensors), run_plan(program, whole, tensors))


@pytest.mark.exhaustive(sample=["ring"])
@pytest.mark.parametrize("cp", ["ring", "ulysses", "gather"])
def test_bf16_is_as_near_to_fp64_as_one_rank_of_it_is(cp: str) -> None:
    split, whole = _errors_in_bf16(cp)
    assert max(whole.values()) > 1e-3, "bf16 it is"
    assert max(split.values()) < 1.5 * max(whole.values())
    assert sum(split.values()) < 1.2 * sum(whole.values())


@pytest.mark.exhaustive
def test_bf16_hides_no_block_that_lost_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward takes the logsumexp of the block, not of all."""
    block, backward = attention_ring.attention_block, attention_ring.attention_block_backward

    def stale(grad: Any, query: Any, key: Any, value: Any, mask: Any, out: Any, sums: Any, *options: Any) -> Any:
        _, own = block(query, key, value, mask, *options)
        return backward(grad, query, key, value, mask, out, own, *options)

    monkeypatch.setattr(attention_ring, "attention_block_backward", stale)
    split, whole = _errors_in_bf16("ring")
    assert max(split.values()) > 1.5 * max(whole.values())


def _errors_in_bf16(cp: str) -> tuple[dict[str, float], dict[str, float]]:
    """Of gradients in bf16 beside fp64: of four ranks, and of one."""
    model, program, inputs = _case(4)
    alone = _plan(model, inputs["args.0"], cluster="1 cpu", mesh=(1,))
    exact = run_plan(program, alone, tensors_of(program, model, inputs))
    model = model.bfloat16()
    program = capture(model, (inputs["args.0"],), {})
    tensors = tensors_of(program, model, inputs)
    pinned = {"*/attention#0": "S(2, zigzag)"} if cp == "ring" else None
    plan = _plan(model, inputs["args.0"], cluster="4 cpu", dims={"cp": 4}, cp=cp, constraints=pinned)
    alone = _plan(model, inputs["args.0"], cluster="1 cpu", mesh=(1,))
    split, whole = (_errors(run_plan(program, each, tensors), exact) for each in (plan, alone))
    return split, whole


def _errors(found: Results, exact: Results) -> dict[str, float]:
    return {
        name: float((found.gradients[name].double() - gradient).norm() / gradient.norm())
        for name, gradient in exact.gradients.items()
    }


@pytest.mark.exhaustive(sample=["with tp-ring-23"])
@pytest.mark.parametrize("length", [22, 23])
@pytest.mark.parametrize("cp", ["ring", "gather", None])
@pytest.mark.parametrize(
    "dims", [{"cp": 4}, {"dp_shard": 2, "cp": 2}, {"cp": 2, "tp": 2}], ids=["4", "2x2", "with tp"]
)
def test_lengths_that_do_not_divide_are_split_all_the_same(dims: dict[str, int], cp: str | None, length: int) -> None:
    """Two samples of them, in one dim of every product. Whole remain: positions, and what is said of the loss."""
    model, program, inputs = _case(length=length, layers=1)
    plan = _plan(model, inputs["args.0"], cluster="4 cpu", dims=dims, cp=cp)
    assert not any("replicated" in note for note in plan.notes), plan.notes
    whole = sum(not any(entry.axes) for entry in plan.operators.values())
    assert whole < 0.1 * len(plan.operators)
    assert all(all(entry.axes) for name, entry in plan.operators.items() if "/mm#" in name)
    assert _difference(model, program, inputs, plan) < TOLERANCE


def test_padding_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of the rows of the last rank."""

    def in_front(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        grown = x.new_zeros(shape)
        grown[tuple(slice(whole - size, None) for size, whole in zip(x.shape, shape, strict=True))] = x
        return grown

    model, program, inputs = _case(length=23, layers=1)
    plan = _plan(model, inputs["args.0"], cluster="4 cpu", dims={"cp": 4}, cp="gather")
    monkeypatch.setattr(emit_redistribution, "padded", in_front)
    assert _difference(model, program, inputs, plan) > 1e-3


def test_a_way_without_its_axis_is_refused() -> None:
    model, _, inputs = _case()
    with pytest.raises(ConfigurationError, match="there is none: write dims="):
        _plan(model, inputs["args.0"], cluster="2 cpu", dims={"tp": 2}, cp="ring")
    with pytest.raises(ConfigurationError, match="write one of ring, ulysses, gather"):
        _plan(model, inputs["args.0"], cluster="2 cpu", dims={"cp": 2}, cp="rings")


def test_free_axes_take_zigzag_order_where_heads_do_not_fill_the_devices() -> None:
    choices = [AxisChoice("s", ("s", 0), 8, False, (), ()), AxisChoice("s", ("s", 0), 4, False, (), (), zigzag=True)]
    free, named = Mesh(("outer", "inner"), (2, 4)), Mesh(("dp_shard", "tp"), (2, 4))
    assert [c.zigzag for c in orders_offered(choices, free, 4)] == [False, True]
    assert [c.zigzag for c in orders_offered(choices, free, 8)] == [False]
    assert [c.zigzag for c in orders_offered(choices, named, 4)] == [False]
    assert [c.zigzag for c in orders_offered(choices, Mesh(("cp",), (2,)), 64)] == [False, True]


def test_all_ranks_start_their_collectives_in_one_order() -> None:
    """Ranks of a causal ring compute different blocks; one that reorders its hops would read gradients as keys."""
    model, program, inputs = _case()
    pinned = {"*/attention#0": "S(2)", "*/attention_backward#0/bwd": "S(2)"}
    plan = _plan(model, inputs["args.0"], cluster="4x1 cpu @ 1Gb", dims={"cp": 4}, cp="ring", constraints=pinned)
    assert plan.bucket_bytes is not None, "collectives are started early"
    orders = {tuple(_started(program, plan, rank)) for rank in range(4)}
    assert len(orders) == 1
    assert sum(kind == "neighbours" for _, kind, _ in orders.pop()) > 4 * 3


def _started(program: Program, plan: Plan, rank: int) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for name, graph_module in lowered_step(program, plan, rank).only.graphs.items():
        for node in graph_module.graph.nodes:
            kind = collective_of(node)
            if kind is not None:
                yield name, kind, (*node.meta["group_axes"], node.name if HOP in node.meta else "")

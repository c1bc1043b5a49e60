"""A ring of attention with a window: numbers as on one rank, hops to the neighbours alone, and no block for nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.cost_models.operators_attention import keys_in_window, pairs_in_blocks
from autopar.graphs.collective_nodes import HOP
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Shard
from autopar.ops.attention_blocks import Band
from autopar.ops.ring_attention import attention_block
from autopar.passes.implementations import attention_ring
from autopar.passes.lowering.chain import lowered_step
from autopar.planner.problem.prices import Prices
from autopar.plans.parallel_plan import Plan
from autopar.rules.alternatives import rule_as
from tests.passes.hand_plans import run_plan, tensors_of, worst

TOLERANCE = 1e-9
TOKENS, SIZE = 32, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of one attention, in fp64; its mask is written out. keeps: a bool input that hides keys, too."""

    window: int
    causal: bool = True
    tokens: int = TOKENS
    dropout: float = 0.0
    key_heads: int = 2
    keeps: bool = False

    @cached_property
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Model(self).double()

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        kept = (torch.rand(2, 1, 1, self.tokens) < 0.7) | (torch.arange(self.tokens) == 0)
        return torch.randn(2, self.tokens, 16, dtype=torch.float64), *([kept] if self.keeps else [])

    def plan(self, ranks: int, **asked: Any) -> Plan:
        asked = {"dims": {"cp": ranks}, "cp": "ring"} | asked if ranks > 1 else {"mesh": (1,)}
        return autopar.plan(self.model, self.inputs, cluster=f"{ranks} cpu", mode="fast",
                            with_baselines=False, **asked)  # fmt: skip

    def error(self, plan: Plan) -> float:
        """Largest, of the loss and of every gradient, against one rank."""
        program = capture(self.model, self.inputs, {})
        tensors = tensors_of(program, self.model, {f"args.{at}": x for at, x in enumerate(self.inputs)})
        return worst(run_plan(program, plan, tensors), run_plan(program, self.plan(1), tensors))


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.query, self.out = nn.Linear(16, 4 * SIZE), nn.Linear(4 * SIZE, 16)
        self.key, self.value = (nn.Linear(16, case.key_heads * SIZE, bias=False) for _ in range(2))

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (self.query, self.key, self.value))
        place = torch.arange(x.shape[1], device=x.device)
        behind = place[:, None] - place
        mask = (behind < self.case.window) & (behind >= 0 if self.case.causal else -behind < self.case.window)
        mask = mask if kept is None else mask & kept
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, self.case.dropout, enable_gqa=self.case.key_heads != 4
        )  # fmt: skip
        return ((x + self.out(mixed.transpose(1, 2).flatten(-2))) ** 2 * (1 + place[:, None])).mean()


CASES = {
    "smaller than a block": Case(window=3),
    "a block": Case(window=8),
    "one more": Case(window=9),
    "larger": Case(window=13),
    "larger than the ring of 4": Case(window=30),
    "no divisor": Case(window=5, tokens=37),
    "one key head, dropout": Case(window=6, key_heads=1, dropout=0.3),
    "padding": Case(window=10, keeps=True),
    "causal and padding": Case(window=TOKENS, keeps=True, key_heads=4),
    "both sides": Case(window=5, causal=False),
    "both sides, larger, dropout": Case(window=14, causal=False, dropout=0.3),
}


def _orders(plan: Plan) -> set[bool]:
    placed = (chosen.inputs[0][0] for name, chosen in plan.operators.items() if name.endswith("attention#0"))
    return {isinstance(each, Shard) and each.zigzag for each in placed}


@pytest.mark.exhaustive(sample=["smaller than a block-4", "larger-8", "both sides-4", "no divisor-2", "padding-4"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_a_window_in_a_ring_equals_one_rank(name: str, ranks: int) -> None:
    plan = CASES[name].plan(ranks)
    if CASES[name].tokens % ranks == 0:
        ways = {chosen.implementation for name, chosen in plan.operators.items() if "/attention" in f"/{name}"}
        assert ways == {"ring"}
    assert CASES[name].error(plan) < TOLERANCE


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_causal_mask_beside_another_one_lies_in_zigzag_order(ranks: int) -> None:
    case = CASES["causal and padding"]
    plan = case.plan(ranks, constraints={"*attention#0": "S(2, zigzag)"})
    assert _orders(plan) == {True}
    assert case.error(plan) < TOLERANCE


def test_a_window_alone_lies_in_its_order() -> None:
    with pytest.raises(autopar.errors.AutoparError):
        CASES["larger"].plan(4, constraints={"*attention#0": "S(2, zigzag)"})


def _lowered(case: Case, plan: Plan, rank: int) -> Iterator[fx.Node]:
    graphs = lowered_step(capture(case.model, case.inputs, {}), plan, rank).only.graphs
    for name in ("forward", "backward"):
        yield from graphs[name].graph.nodes


@pytest.mark.exhaustive(sample=["smaller than a block-4", "larger-8", "padding", "both sides-4"])
@pytest.mark.parametrize(
    ("name", "ranks", "hops"),
    [("smaller than a block", 4, 1), ("smaller than a block", 8, 1), ("a block", 4, 1), ("one more", 4, 1),
     ("larger", 4, 2), ("larger", 8, 3), ("larger than the ring of 4", 4, 3), ("padding", 8, 3),
     ("both sides", 4, 2), ("both sides", 8, 2)],
)  # fmt: skip
def test_messages_are_as_many_and_as_large_as_their_price_says(name: str, ranks: int, hops: int) -> None:
    """Forward so many hops; backward as many of keys, and as many of sums, of which the last goes home."""
    case = CASES[name]
    plan = case.plan(ranks)
    prices = Prices(Cluster.parse(f"{ranks} cpu"), plan.mesh)
    program = capture(case.model, case.inputs, {})
    expected = 0
    for node in program.graph.nodes:
        if "attention" in str(node.target):
            (traffic,) = rule_as(node, "ring").ring_traffic.values()
            assert prices.ring_hops(traffic, "s", ("s",), turned=False) == hops
            home = hops + 1 if traffic.home else 0
            expected += (hops * traffic.nbytes + home * traffic.home) // ranks
    for rank in range(ranks):
        found = [node for node in _lowered(case, plan, rank) if HOP in node.meta]
        assert len(found) == hops + hops + hops + 1
        sizes = (math.prod(node.meta["local_shape"]) * node.meta["dtype"].itemsize for node in found)
        assert sum(sizes) == expected


@pytest.mark.parametrize("name", ["larger", "both sides, larger, dropout"])
def test_recomputed_rings_and_early_starts_keep_one_order(name: str) -> None:
    """A rank that started a round earlier than others would read what is not for it."""
    case = CASES[name]
    program = capture(case.model, case.inputs, {})
    tensors = tensors_of(program, case.model, {"args.0": case.inputs[0]})
    plan, alone = case.plan(8), run_plan(program, case.plan(1), tensors)
    again = [name for name in plan.operators if not name.endswith("/bwd")]
    buckets = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 1e6)
    assert worst(run_plan(program, plan, tensors, recompute=again), alone) < TOLERANCE
    assert worst(run_plan(program, plan, tensors, bucket_bytes=buckets), alone) < TOLERANCE


def test_a_rank_computes_the_blocks_that_it_sees() -> None:
    case = CASES["smaller than a block"]
    plan = case.plan(4)
    counts = [sum(node.target is attention_block for node in _lowered(case, plan, rank)) for rank in range(4)]
    assert counts == [1, 2, 2, 2]


def test_the_price_of_a_rank_is_what_its_blocks_compute() -> None:
    """A window of 1,024 of 131,072 tokens, on the last of 8 ranks: 16,384 rows see 1,024 keys each, not 131,072."""
    band = Band.of(True, 1024)
    assert float(keys_in_window(16_384, 131_072, band, "cuda")) == pytest.approx(1023.5, rel=2e-3)
    own, before = ((114_688, 16_384),), ((98_304, 16_384),)
    split = pairs_in_blocks(own, own, band, "cuda") + pairs_in_blocks(own, before, band, "cuda")
    assert split / 16_384 == pytest.approx(1023.5, rel=2e-3)
    assert float(keys_in_window(16_384, 131_072, Band.of(False, 1024), "cuda")) == pytest.approx(2047, rel=2e-3)


@pytest.mark.parametrize("fault", ["a block too few", "a hop too few", "a window off by one"])
def test_a_fault_of_the_ring_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above compare differs where a ring leaves out what it needs."""
    case = CASES["larger"]
    plan = case.plan(4)
    ring = attention_ring._Ring
    if fault == "a block too few":
        sees = ring.sees
        monkeypatch.setattr(ring, "sees", lambda self, step: None if step == 2 else sees(self, step))
    elif fault == "a hop too few":
        offsets = attention_ring.ring_offsets
        monkeypatch.setattr(attention_ring, "ring_offsets", lambda runs, band: offsets(runs, band)[:-1])
    else:
        of = Band.of.__func__  # type: ignore[attr-defined]
        less = classmethod(lambda cls, causal, window: replace(of(cls, causal, window), before=window - 2))
        monkeypatch.setattr(Band, "of", less)
    program = capture(case.model, case.inputs, {})
    tensors = tensors_of(program, case.model, {"args.0": case.inputs[0]})
    faulty = run_plan(program, plan, tensors)
    monkeypatch.undo()
    assert worst(faulty, run_plan(program, case.plan(1), tensors)) > 1e-4

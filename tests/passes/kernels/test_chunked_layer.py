"""Layers of experts in chunks of their tokens: loss and gradients of one rank, whoever gets how many rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import Tensor

from autopar.passes.kernels import chunked_layer
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.passes.lowering import chain as lowering
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from tests.passes.hand_plans import Results, run_plan, worst
from tests.passes.kernels import test_capped_experts as capped
from tests.passes.kernels.test_dispatched_rows import captured, exchanges, planned, rows_alone
from tests.passes.kernels.test_travelling_layer import planned as two_hops

__all__ = ["rows_alone"]


@cache
def even() -> tuple[Program, dict[str, Tensor], Plan, Results]:
    """A program, its tensors, its plan over two ranks, and what one rank computes."""
    program, tensors = captured(8, "even")
    return program, tensors, planned(program, ep=2), run_plan(program, planned(program, dp_shard=1), tensors)


def in_chunks(plan: Plan, chunks: int) -> Plan:
    """The plan with rows that travel in so many chunks."""
    return plan.with_(product_chunks={"all_to_all": chunks})


def products(program: Program, plan: Plan) -> int:
    """How many products of experts rank 0 computes."""
    graph = lowering.lowered_step(program, plan, 0, until=lowering.sort_rows).stages[0].program.graph
    return sum("sorted_expert" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize(("kind", "dims", "chunks"), [
    ("one expert has all", {"ep": 2}, 4),
    ("a rank without tokens", {"ep": 4}, 2),
    ("some of no expert", {"ep": 2}, 2),
])  # fmt: skip
def test_chunks_compute_what_one_rank_does(kind: str, dims: dict[str, int], chunks: int) -> None:
    program, tensors = captured(8, kind, with_bias=kind != "some of no expert")
    found = run_plan(program, in_chunks(planned(program, **dims), chunks), tensors, bucket_bytes={})
    assert worst(found, run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-13


def test_chunks_travel_in_two_hops_as_well() -> None:
    program, tensors, _, alone = even()
    plan = two_hops(program, "2x2")
    assert len(exchanges(program, in_chunks(plan, 2))) == 2 * len(exchanges(program, plan))
    assert worst(run_plan(program, in_chunks(plan, 2), tensors, bucket_bytes={}), alone) < 1e-13


def test_the_same_rows_travel_and_two_runs_have_equal_bits() -> None:
    program, tensors, whole, alone = even()
    plan = in_chunks(whole, 2)
    assert products(program, plan) == 2 * products(program, whole)
    assert len(exchanges(program, plan)) == 2 * len(exchanges(program, whole))
    found = run_plan(program, plan, tensors)
    assert worst(found, alone) < 1e-13
    assert worst(found, run_plan(program, plan, tensors)) == 0.0


def test_rows_alone_in_chunks_of_experts_that_do_not_divide(rows_alone: None) -> None:
    program, tensors = captured(9, "even")
    plan = in_chunks(planned(program, ep=2), 2)
    assert worst(run_plan(program, plan, tensors), run_plan(program, planned(program, dp_shard=1), tensors)) < 1e-13


def test_kernels_with_two_results_and_computing_again() -> None:
    program, tensors, _, alone = even()
    fused = with_kernels(program, ("gated",))
    plan = in_chunks(planned(fused, ep=2), 2)
    again = [name for name in plan.operators if not name.endswith("/bwd")]
    assert worst(run_plan(fused, plan, tensors, recompute=again), alone) < 1e-13


def test_copies_a_capacity_and_few_tokens_stay_whole() -> None:
    program, _, whole, _ = even()
    for plan, chunks in ((planned(program, (0, 3, 7), ep=2), 2), (whole, 16)):
        assert products(program, in_chunks(plan, chunks)) == products(program, plan)
    of = capped.case()
    plan = capped.planned(of, ep=4)
    assert products(of.program, in_chunks(plan, 2)) == products(of.program, plan)


@pytest.mark.parametrize("wrong", ["rows lost", "chunks out of order", "a gradient of one chunk", "other tokens"])
def test_what_goes_wrong_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, tensors, plan, alone = even()
    writer = chunked_layer._Writer
    copies, sliced, joined, added = writer._copies, writer._sliced, writer._joined, writer._added
    changed: dict[str, tuple[str, Any]] = {
        "rows lost": ("_copies", lambda self, tokens, part, *more: copies(self, tokens, 0, *more)),
        "chunks out of order": ("_joined", lambda self, parts, *more: joined(self, parts[::-1], *more)),
        "a gradient of one chunk": ("_added", lambda self, parts, node: added(self, parts[:1], node)),
        "other tokens": ("_sliced", lambda self, *more: sliced(self, *more)[::-1]),
    }
    monkeypatch.setattr(writer, *changed[wrong])
    assert worst(run_plan(program, in_chunks(plan, 2), tensors), alone) > 1e-3

"""The fuzz finds nothing in the code as it is, and finds faults that are planted."""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch

from autopar.ops import masked
from autopar.passes.implementations import IMPLEMENTATIONS
from benchmarks.fuzz.attention import check_attention
from benchmarks.fuzz.check import Outcome, check_seed
from benchmarks.fuzz.graphs import random_graph
from tests.rules.case_values import Case
from tests.rules.operator_cases import CASES


def of(*words: str) -> list[Case]:
    """Cases whose name contains one of the words."""
    return [case for case in CASES if any(word in case.name for word in words)]


def problems(cases: list[Case], seeds: int) -> list[Outcome]:
    return [outcome for seed in range(seeds) if (outcome := check_seed(seed, cases, steps=3)).problem]


def test_a_seed_gives_the_same_graph_and_plan_again() -> None:
    first, second = check_seed(11), check_seed(11)
    assert first == second
    assert first.graph != check_seed(12).graph


def test_values_of_the_graph_are_used_again() -> None:
    torch.manual_seed(0)
    drawn = random_graph(random.Random(0), steps=8)
    calls = [n for n in drawn.program.graph.nodes if n.op == "call_function"]
    assert sum(any(source in calls for source in node.all_input_nodes) for node in calls) >= 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_nothing_is_found() -> None:
    outcomes = [check_seed(seed) for seed in range(60)]
    assert not [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem]
    assert sum(outcome.num_sharded for outcome in outcomes) > 100


@pytest.mark.exhaustive
def test_nothing_is_found_around_experts() -> None:
    cases = 6 * of("expert_") + of("aten.mul.", "aten.add.", "aten.silu", "aten.expand", "aten.slice.", "aten.view")
    outcomes = [check_seed(seed, cases, steps=7) for seed in range(100)]
    assert not [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem]
    assert sum("expert_" in target for outcome in outcomes for target in outcome.targets) > 200


def test_an_unmasked_gather_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(x: torch.Tensor, dim: int, index: torch.Tensor, start: int) -> torch.Tensor:
        return x.gather(dim, (index - start).clamp(0, x.shape[dim] - 1))

    assert not problems(of("aten.gather"), 40)
    monkeypatch.setattr(masked, "masked_gather", unmasked)
    assert problems(of("aten.gather"), 40)


@pytest.mark.slow
def test_a_mean_that_divides_by_the_local_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(x: torch.Tensor, dims: list[int], keepdim: bool, count: int, *rest: object) -> torch.Tensor:
        return x.mean(dims, keepdim)

    assert not problems(of("aten.mean"), 40)
    monkeypatch.setattr("autopar.passes.implementations.sharded_reductions.local_mean", mean)
    assert problems(of("aten.mean"), 40)


@pytest.mark.slow
def test_a_bias_that_only_one_rank_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would drop the collectives that bring it."""

    def forgotten(context, args, kwargs):  # type: ignore[no-untyped-def]
        if any(context.coordinate):
            args = (*args[:2], None, *args[3:])
        return context.call_operator(args, kwargs)

    cases = of("aten.convolution.default")
    assert not problems(cases, 40)
    monkeypatch.setitem(cast(dict[str, object], IMPLEMENTATIONS), "split_convolution", forgotten)
    assert problems(cases, 40)


def test_nothing_is_found_around_attention() -> None:
    outcomes = [check_attention(seed) for seed in range(8)]
    assert not [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem]
    assert any(target.startswith("ring") for outcome in outcomes for target in outcome.targets)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_nothing_is_found_around_much_attention() -> None:
    outcomes = [check_attention(seed) for seed in range(8, 400)]
    assert not [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem]
    assert sum("zigzag" in target for outcome in outcomes for target in outcome.targets) > 50

"""What does not divide is named by the explanation, is no choice, and costs what a size that divides saves."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.explain.indivisible import indivisible_names
from autopar.explain.origin import Remembered
from autopar.explain.recovered import recovered_plan
from autopar.planner.one_mesh.recovered_problem import Recovered
from autopar.plans.parallel_plan import Plan
from benchmarks.explanation_checks import raw_optimum
from benchmarks.models import gpt2, token_inputs

ATTENTION = "transformer.h.0.attn/attention#0"


def planned(heads: int, vocabulary: int = 512) -> Plan:
    with torch.device("meta"):
        model = gpt2(layers=1, width=768, heads=heads, vocabulary=vocabulary, positions=1024)
        inputs = token_inputs(vocabulary)(4, 1024)
    return autopar.plan(model, inputs, cluster="4 H100-SXM", dims={"tp": 4}, optimizer=torch.optim.AdamW,
        with_baselines=False)


def recovered_of(plan: Plan) -> Recovered:
    assert isinstance(plan.origin, Remembered)
    return recovered_plan(plan.origin.source, plan)


def splits_of(recovered: Recovered, name: str) -> set[str | None]:
    """What the strategies of an operator split over the only axis."""
    strategies = recovered.built.variables[recovered.variable_of(name)].strategies
    assert strategies is not None
    return {axes[0] for axes in strategies.axes}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_six_heads_on_four_ranks_are_no_choice_and_eight_cost_less() -> None:
    six, eight = planned(6), planned(8)
    assert "no split of h over tp=4: 6 does not divide" in str(six.explain(ATTENTION))
    assert "no split of h" not in str(eight.explain(ATTENTION))
    assert "h" not in splits_of(recovered_of(six), ATTENTION)
    assert "h" in splits_of(recovered_of(eight), ATTENTION)
    optimum = raw_optimum(recovered_of(eight).built.problem, (), {}, 60.0)
    assert optimum == pytest.approx(eight.objective_seconds, rel=1e-9)
    assert optimum < six.objective_seconds * 0.99


@pytest.mark.slow
def test_a_vocabulary_that_does_not_divide_is_split_all_the_same() -> None:
    recovered = recovered_of(planned(8, vocabulary=50257))
    index = recovered.variable_of("lm_head/mm#0")
    assert "n" in splits_of(recovered, "lm_head/mm#0")
    assert indivisible_names(recovered, index) == []

"""Where memory is short, the loss in chunks is planned beside the whole one, and the shorter step is the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import InfeasibleError
from autopar.planner.search import loss_in_chunks
from autopar.plans.parallel_plan import Plan

ROWS, WORDS, WIDTH = 16384, 8192, 64


class Words(nn.Module):
    """forward(tokens (N), labels (N)) -> loss over 8,192 words: 256 MiB of logits in bf16, as much for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embed(tokens).relu()).float(), labels)


def planned(memory_limit: str, **asked: Any) -> Plan:
    with torch.device("meta"):
        module, tokens = Words(), torch.empty(ROWS, dtype=torch.long)
    inputs = {"tokens": tokens, "labels": tokens}
    found = autopar.plan(
        module, inputs, cluster="1 H100-SXM", precision="bf16", mode="fast", memory_limit=memory_limit,
        micro_batches=1, **asked,
    )  # fmt: skip
    assert isinstance(found, Plan)
    return found


def test_memory_that_suffices_leaves_the_loss_whole() -> None:
    plan = planned("4GiB")
    assert "cross_entropy" in plan.kernels
    assert loss_in_chunks.KIND not in plan.kernels
    assert not [note for note in plan.notes if "memory is short" in note]


def test_what_does_not_fit_whole_is_planned_in_chunks() -> None:
    with pytest.raises(InfeasibleError):
        planned("300MiB", kernels=("cross_entropy",))
    plan = planned("300MiB")
    assert loss_in_chunks.KIND in plan.kernels
    assert plan.predicted.peak_bytes <= 300 << 20


@pytest.mark.parametrize(("penalty", "how"), [(0.0, "whole"), (1.0, "in chunks")])
def test_the_shorter_step_is_taken_and_both_are_noted(
    penalty: float, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """penalty: seconds that a step with the whole loss is said to take longer; without one the chunks do."""
    monkeypatch.setattr(loss_in_chunks, "FULL", 0.0)  # memory is short whatever is planned
    choose = loss_in_chunks.planned_in_chunks_too

    def judged(program: Any, request: Any, query: Any, search: Any) -> Plan:
        def found(asked: Any) -> Plan:
            plan: Plan = search(asked)
            seconds = plan.predicted.step_seconds + penalty * (loss_in_chunks.KIND not in plan.kernels)
            return replace(plan, predicted=replace(plan.predicted, step_seconds=seconds))

        return choose(program, request, query, found)

    monkeypatch.setattr("autopar.planner.planning.planned_in_chunks_too", judged)
    plan = planned("4GiB")
    assert (loss_in_chunks.KIND in plan.kernels) == (how == "in chunks")
    assert any(f"the loss is computed {how}" in note for note in plan.notes)

"""Where memory is short, the loss in chunks and MLPs in tiles are planned beside whole ones; the shortest step wins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import ConfigurationError, InfeasibleError
from autopar.planner.search import kernels_for_memory
from autopar.planner.search.kernels_for_memory import LOSS, MLP
from autopar.plans.parallel_plan import Plan

ROWS, WORDS, WIDTH, HIDDEN = 16384, 8192, 64, 4096


class Words(nn.Module):
    """forward(tokens (N), labels (N)) -> loss over 8,192 words: 256 MiB of logits in bf16, as much for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embed(tokens).relu()).float(), labels)


class Hidden(nn.Module):
    """forward(x (N, 64)) -> loss of an MLP with 4,096 hidden activations a row: 128 MiB in bf16, three at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (x + self.down(functional.gelu(self.up(self.norm(x))))).square().mean()


class Both(nn.Module):
    """An MLP in front of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.mlp = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False), Hidden()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mlp.down(functional.gelu(self.mlp.up(self.mlp.norm(x))))
        return functional.cross_entropy(self.head(x).float(), labels)


def planned(memory_limit: str, build: type[nn.Module] = Words, cluster: str = "1 H100-SXM", **asked: Any) -> Plan:
    with torch.device("meta"):
        module, tokens = build(), torch.empty(ROWS, dtype=torch.long)
        inputs = {"x": torch.empty(ROWS, WIDTH)} if build is Hidden else {"tokens": tokens, "labels": tokens}
    found = autopar.plan(
        module, inputs, cluster=cluster, precision="bf16", mode="fast", memory_limit=memory_limit, micro_batches=1,
        **asked,
    )  # fmt: skip
    assert isinstance(found, Plan)
    return found


def test_memory_that_suffices_leaves_everything_whole() -> None:
    for build in (Words, Hidden):
        plan = planned("4GiB", build)
        assert not {LOSS, MLP} & {*plan.kernels}
        assert not [note for note in plan.notes if "memory is short" in note]


@pytest.mark.parametrize(
    ("build", "kind", "usual", "limit"), [(Words, LOSS, ("cross_entropy",), 300), (Hidden, MLP, (), 250)]
)
def test_what_does_not_fit_whole_is_planned_in_parts(
    build: type[nn.Module], kind: str, usual: tuple[str, ...], limit: int
) -> None:
    with pytest.raises(InfeasibleError):
        planned(f"{limit}MiB", build, kernels=usual)
    plan = planned(f"{limit}MiB", build)
    assert kind in plan.kernels
    assert plan.predicted.peak_bytes <= limit << 20
    assert any("no plan fits with everything whole" in note for note in plan.notes)


def test_mlps_are_tiled_on_cpus_too() -> None:
    """Products of torch; a loss of ours is none there."""
    limit = "250MiB"
    with pytest.raises(InfeasibleError):
        planned(limit, Hidden, "1 cpu", kernels=())
    assert planned(limit, Hidden, "1 cpu").kernels == (MLP,)


def test_both_are_tried_where_one_does_not_suffice() -> None:
    for kernels in (("cross_entropy",), ("cross_entropy", LOSS), ("cross_entropy", MLP)):
        with pytest.raises(InfeasibleError):
            planned("260MiB", Both, kernels=kernels)
    assert {LOSS, MLP} <= {*planned("260MiB", Both).kernels}


@pytest.mark.parametrize(("penalty", "how"), [(0.0, "everything whole"), (1.0, "the loss in chunks")])
def test_the_shorter_step_is_taken_and_both_are_noted(
    penalty: float, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """penalty: seconds that a step with the whole loss is said to take longer; without one the chunks do."""
    monkeypatch.setattr(kernels_for_memory, "FULL", 0.0)  # memory is short whatever is planned
    choose = kernels_for_memory.planned_for_memory_too

    def judged(program: Any, request: Any, query: Any, search: Any) -> Plan:
        def found(asked: Any) -> Plan:
            plan: Plan = search(asked)
            seconds = plan.predicted.step_seconds + penalty * (LOSS not in plan.kernels)
            return replace(plan, predicted=replace(plan.predicted, step_seconds=seconds))

        return choose(program, request, query, found)

    monkeypatch.setattr("autopar.planner.planning.planned_for_memory_too", judged)
    plan = planned("4GiB")
    assert (LOSS in plan.kernels) == (how != "everything whole")
    assert [note.startswith(f"memory is short: {how}, ") for note in plan.notes if "memory" in note] == [True]


def test_a_kind_that_is_asked_for_is_no_choice() -> None:
    assert planned("4GiB", Hidden, kernels=(MLP,)).kernels == (MLP,)
    with pytest.raises(ConfigurationError, match="tiled_mlp"):
        planned("4GiB", Hidden, kernels=("tiles",))

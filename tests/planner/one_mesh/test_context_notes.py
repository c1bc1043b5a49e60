"""Notes of context parallelism: what an axis cp cannot split, with numbers and the next step."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.planner.one_mesh import context_notes
from tests.planner.test_context_parallelism import Llama


def notes(key_heads: int, ranks: int, length: int, cp: str | None) -> list[str]:
    ids = torch.zeros(2, length, dtype=torch.long)
    plan = autopar.plan(Llama(key_heads), (ids,), cluster=f"{ranks} cpu", dims={"cp": ranks}, cp=cp, mode="fast",
        with_baselines=False)
    assert plan.mesh.axis_names == ("cp",)
    return [note for note in plan.notes if "divide" in note]


@pytest.mark.parametrize(
    ("key_heads", "ranks", "words"),
    [
        (1, 4, "1 key heads do not divide by cp=4: attention splits the queries of every key head over it, and every "
               'rank has all keys and values; cp="ring" keeps keys and values split'),
        (2, 4, "2 key heads do not divide by cp=4: attention splits the query sequence over it, and every rank gathers "
               'all keys and values; dims={"cp": 2, "cp_inner": 2} without cp= may run a ring of Ulysses; cp="ring" '
               "keeps keys and values split"),
    ],
)  # fmt: skip
def test_heads_that_ulysses_cannot_split_are_named(key_heads: int, ranks: int, words: str) -> None:
    assert notes(key_heads, ranks, 32, "ulysses") == [f'cp="ulysses": {words}']


@pytest.mark.parametrize(("key_heads", "cp"), [(4, "ulysses"), (2, "ring"), (2, None)])
def test_what_runs_as_asked_has_no_note(key_heads: int, cp: str | None) -> None:
    assert notes(key_heads, 4, 32, cp) == []


def test_a_sequence_too_short_to_split_is_named() -> None:
    words = "attention runs replicated over it; pad the sequence to 8, or ask for a size that divides it"
    found = notes(4, 4, 6, "ring")
    assert found == [f"the sequence of 6 does not divide by cp=4 and has fewer than 16 tokens: {words}"]


def test_plain_order_of_a_causal_ring_is_named_with_its_cost() -> None:
    [note] = notes(2, 4, 36, "ring")
    assert note.startswith("the sequence of 36 does not divide by 2 x cp=4: zigzag order")
    assert "the last of 4 ranks computes 1.8 times the average: pad the sequence to 40" in note


class InChunks(torch.nn.Module):
    """A running sum of chunks of 8 places."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = self.project(x).unflatten(1, (-1, 8)).cumsum(2)
        out: torch.Tensor = (sums + sums[:, :, -1:].cumsum(1)).pow(2).sum()
        return out


@pytest.mark.parametrize(
    ("ranks", "words"), [(2, "the sequence of other operators only"), (4, "nothing: it divides no")]
)
def test_a_scan_in_chunks_that_do_not_divide_is_named(ranks: int, words: str) -> None:
    """16 places are 2 chunks, which 4 ranks cannot share."""
    x = torch.randn(1, 16, 16)
    plan = autopar.plan(InChunks(), (x,), cluster=f"{ranks} cpu", dims={"cp": ranks}, mode="fast", with_baselines=False)
    [note] = [note for note in plan.notes if "no fused attention" in note]
    assert f"so it splits {words}" in note


def test_two_axes_share_the_sequence() -> None:
    """12 divides by 2 x 2 of one axis, and not by 2 x 4 of both."""
    mesh = autopar.layouts.placement.Mesh(("cp", "cp_inner"), (2, 2))
    [note] = context_notes._order(12, [2, 2], mesh, [0, 1])
    assert "2 x cp=2 x cp_inner=2" in note
    assert note.endswith("pad the sequence to 16")
    assert not list(context_notes._order(12, [2], mesh, [0]))


def test_a_plan_in_zigzag_order_explains_it() -> None:
    """Free axes, which its limits are compared with, have no such order."""
    ids = torch.zeros(2, 32, dtype=torch.long)
    asked = {"dims": {"cp": 2}, "cp": "ring", "constraints": {"*/attention#0": "S(2, zigzag)"}}
    plan = autopar.plan(Llama(), (ids,), cluster="2 cpu", mode="fast", with_baselines=False, **asked)
    text = str(plan.explain(next(name for name in plan.operators if name.endswith("/attention#0"))))
    assert "S(1, zigzag): dim 1 in zigzag order: rank 0 has the first and the last block" in text
    assert "cp splits s (dim 2, zigzag); runs as ring" in text

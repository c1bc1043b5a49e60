"""Context parallelism of whole models: loss and gradients are those of one rank, however attention runs.

A sample; `python -m benchmarks.context_parity` runs every way of every model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from autopar.ops import halo, linear_recurrence
from autopar.passes.implementations import attention_ring
from autopar.passes.implementations.local_context import LocalContext
from benchmarks.context_parity.check import TOLERANCE, TOLERANCE_TO_EAGER, Checked, Settings, ways
from benchmarks.context_parity.rows import ROWS

_Ring = attention_ring._Ring
SAMPLE: dict[str, Settings] = {
    "gpt2, dropout": Settings(dims={"cp": 4}, cp="ring", zigzag=True),
    "bert, padded": Settings(dims={"cp": 4}, cp="ring"),
    "documents": Settings(dims={"cp": 2, "dp_shard": 2}, cp="ring", zigzag=True),
    "gemma3": Settings(dims={"cp": 4}, cp="ring", zigzag=True),
    "mistral, padded": Settings(dims={"cp": 4}, cp="ring"),
    "stack, causal, dropout": Settings(dims={"cp": 2, "cp_inner": 2}, cp="ring", zigzag=True),
    "stack": Settings(dims={"cp": 2, "tp": 2}, cp="ring"),
}


@cache
def checked(name: str) -> Checked:
    return Checked(ROWS[name])


@pytest.mark.exhaustive(sample=["bert", "stack, causal"])
@pytest.mark.parametrize("name", SAMPLE)
def test_a_ring_of_every_kind_of_attention_equals_one_rank(name: str) -> None:
    settings = SAMPLE[name]
    plan = checked(name).settled(settings)
    assert all(way.startswith("ring") and way.endswith("zigzag") == settings.zigzag for way in ways(plan)), ways(plan)
    assert checked(name).error(plan) < TOLERANCE


SCANS: dict[str, tuple[Settings, str]] = {
    "mamba2": (Settings(dims={"cp": 8}), "convolution"),
    "linear attention": (Settings(dims={"cp": 4}), "cumsum"),
    "time mixing": (Settings(dims={"cp": 2, "cp_inner": 2}), "linear_recurrence"),
    "conformer": (Settings(dims={"cp": 2}), "convolution"),
}
"""With a part of the name of an operator that keeps the sequence split."""


@pytest.mark.parametrize("name", SCANS)
def test_states_and_edges_go_along_the_ranks(name: str) -> None:
    settings, kept = SCANS[name]
    plan = checked(name).settled(settings)
    assert checked(name).error(plan, checked(name).eager) < TOLERANCE_TO_EAGER
    mixed = [chosen.axes for operator, chosen in plan.operators.items() if kept in operator]
    assert mixed
    assert all(axis is not None for axes in mixed for axis in axes)


def _no_state_from_before(patch: pytest.MonkeyPatch) -> None:
    last = linear_recurrence.last_of_block
    patch.setattr(linear_recurrence, "last_of_block", lambda *args: last(*args) * 0)


def _no_edges(patch: pytest.MonkeyPatch) -> None:
    edges = halo.edges
    patch.setattr(halo, "edges", lambda x, dim, runs: edges(x, dim, runs) * 0)


@pytest.mark.parametrize("fault", [_no_state_from_before, _no_edges], ids=lambda fault: fault.__name__)
def test_a_fault_between_blocks_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = checked("time mixing").settled(Settings(dims={"cp": 2}))
    fault(monkeypatch)
    assert checked("time mixing").error(plan) > 1e3 * TOLERANCE


def _lost_block(patch: pytest.MonkeyPatch) -> None:
    sees = _Ring.sees
    patch.setattr(_Ring, "sees", lambda self, step: None if step == 1 else sees(self, step))


def _swapped_chunks(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes its two blocks for one another's."""
    runs = attention_ring.local_runs

    def swapped(size: int, layout: Any, dim: int, mesh: Any, coordinate: Any) -> Any:
        found = runs(size, layout, dim, mesh, coordinate)
        return found[::-1] if coordinate[0] == 1 else found

    patch.setattr(attention_ring, "local_runs", swapped)


def _local_sums(patch: pytest.MonkeyPatch) -> None:
    """Backward takes the logsumexp of the block, not of all."""
    block, backward = attention_ring.attention_block, attention_ring.attention_block_backward

    def stale(grad: Any, query: Any, key: Any, value: Any, mask: Any, out: Any, sums: Any, *options: Any) -> Any:
        _, own = block(query, key, value, mask, *options)
        return backward(grad, query, key, value, mask, out, own, *options)

    patch.setattr(attention_ring, "attention_block_backward", stale)


def _one_hop_short(patch: pytest.MonkeyPatch) -> None:
    waited = LocalContext.waited
    patch.setattr(_Ring, "send_home", lambda self, node, step: node)
    patch.setattr(
        LocalContext, "waited", lambda self, node: waited(self, node) if "_c10d" in str(node.target) else node
    )


def _other_columns(patch: pytest.MonkeyPatch) -> None:
    columns = _Ring._mask_of
    patch.setattr(_Ring, "_mask_of", lambda self, step: columns(self, (step + 1) % self.ranks))


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    _lost_block: "stack, causal, dropout",
    _swapped_chunks: "stack, causal, dropout",
    _local_sums: "stack, causal, dropout",
    _one_hop_short: "stack, causal, dropout",
    _other_columns: "documents",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    name = FAULTS[fault]
    plan = checked(name).settled(Settings(dims={"cp": 2}, cp="ring", zigzag=name != "documents"))
    assert checked(name).error(plan) < TOLERANCE
    fault(monkeypatch)
    assert checked(name).error(plan) > 1e3 * TOLERANCE

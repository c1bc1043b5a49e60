"""Turns: the rows of all chunks are on their way before a product runs, and return before gradients of weights."""

from __future__ import annotations

import pytest
from torch import fx

from autopar.graphs.expert_loads import EXCHANGED
from autopar.passes.kernels import sort_by_expert
from autopar.passes.lowering import chain as lowering
from tests.passes.kernels.test_chunked_layer import even, in_chunks


def calls(chunks: int) -> dict[str, list[str]]:
    """Phase -> what moves wide rows and what multiplies them, as started by rank 0."""
    program, _, plan, _ = even()
    parts = lowering.lowered_step(program, in_chunks(plan, chunks), 0).stages[0].partition
    assert parts.backward is not None
    graphs = {"forward": parts.forward.graph, "backward": parts.backward.graph}
    return {phase: [said for node in graph.nodes if (said := _said(node))] for phase, graph in graphs.items()}


def _said(node: fx.Node) -> str:
    if EXCHANGED in node.meta and len(node.meta["local_shape"]) == 2 and node.meta["local_shape"][1] > 1:
        return "back" if node.meta[EXCHANGED].back else "send"
    return next((name for name in ("linear", "outer") if f"sorted_expert_{name}" in str(node.target)), "")


def test_rows_of_all_chunks_go_first_and_gradients_of_weights_last() -> None:
    assert calls(2) == {
        "forward": ["send", "send"] + ["linear", "linear", "back"] * 2,
        "backward": ["send", "send"] + ["linear", "linear", "back", "outer", "outer"] * 2,
    }


def test_one_chunk_takes_turns_with_gradients_of_weights() -> None:
    assert calls(1)["backward"] == ["send", "linear", "linear", "back", "outer", "outer"]


def test_without_turns_a_chunk_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sort_by_expert, "in_turns", lambda *_: None)
    assert calls(2)["forward"] != ["send", "send"] + ["linear", "linear", "back"] * 2

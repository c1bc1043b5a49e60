"""The runner runs passes in order, times them and names them."""

import functools
import logging

import pytest
import torch
from torch.fx import GraphModule

from autopar.passes.runner import pass_name, run_passes
from autopar.passes.tidy.remove_noise import remove_dead_code
from tests.passes.tidy_graphs import trace


def note(graph_module: GraphModule, ctx: list[str], *, word: str) -> GraphModule:
    ctx.append(word)
    return graph_module


def test_passes_run_in_order_with_the_context(caplog: pytest.LogCaptureFixture) -> None:
    words: list[str] = []
    passes = [functools.partial(note, word="first"), functools.partial(note, word="second")]
    with caplog.at_level(logging.DEBUG, logger="autopar.passes.runner"):
        _, timings = run_passes(trace(torch.sin, torch.randn(2)), passes, words)
    assert words == ["first", "second"]
    assert [timing.name for timing in timings] == ["note", "note"]
    assert caplog.text.count("note: 3 -> 3 nodes") == 2


def test_timings_count_nodes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.cos()
        return x.sin()

    _, (timing,) = run_passes(trace(function, torch.randn(2)), [remove_dead_code], None)
    assert (timing.name, timing.nodes_before, timing.nodes_after) == (pass_name(remove_dead_code), 4, 3)
    assert timing.cpu_seconds >= 0


def test_the_module_runs_what_the_passes_left_in_its_graph() -> None:
    def cosines(graph_module: GraphModule, ctx: None) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default
        return graph_module

    x = torch.randn(2)
    graph_module, _ = run_passes(trace(torch.sin, x), [cosines], None)
    torch.testing.assert_close(graph_module(x)[0], x.cos())

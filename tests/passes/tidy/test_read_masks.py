"""Masks that constants decide become the causal flag and the window of attention; all others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.decompositions import decomposition_table
from autopar.passes.arguments import arguments
from autopar.passes.runner import run_passes
from autopar.passes.tidy.index_values import IndexValues
from autopar.passes.tidy.one_spelling import one_spelling
from autopar.passes.tidy.read_masks import ATTENTION, read_masks
from autopar.passes.tidy.remove_noise import remove_dead_code
from tests.passes.tidy_graphs import NO_BACKWARD, trace

N = 12
Mask = Callable[[Tensor], Tensor]
LEAST = torch.finfo(torch.float32).min


def place(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2])


def ahead(x: Tensor) -> Tensor:
    """Key minus row, (S, T)."""
    return place(x) - place(x)[:, None]


def causal(x: Tensor) -> Tensor:
    return ahead(x) <= 0


def in_four_dims(x: Tensor) -> Tensor:
    """As libraries write it: broadcast indices, a condition that always holds, an offset, expanded to the batch."""
    row, key = place(x)[None, None, :, None] + 0, place(x)[None, None, None, :]
    seen = (row >= 0) & (key <= row) & (key > row - 5)
    return seen.expand(x.shape[0], 1, N, N)


def looked_up(x: Tensor) -> Tensor:
    """A padding mask of ones that is indexed by sample and key."""
    padding = torch.ones(x.shape[0], N, dtype=torch.bool)
    sample, key = torch.arange(x.shape[0])[:, None, None, None], place(x)[None, None, None, :]
    return causal(x) & padding[sample, key]


READ: dict[str, tuple[Mask, tuple[bool, int | None]]] = {
    "causal": (causal, (True, None)),
    "ones below the diagonal": (lambda x: torch.ones(N, N, dtype=torch.bool).tril(), (True, None)),
    "added above it": (lambda x: torch.full((N, N), -torch.inf).triu(1), (True, None)),
    "least numbers": (lambda x: torch.where(causal(x), torch.zeros(()), LEAST), (True, None)),
    "window": (lambda x: causal(x) & (ahead(x) > -4), (True, 4)),
    "window of two": (lambda x: causal(x) & (ahead(x) > -2), (True, 2)),
    "window of nearly all": (lambda x: causal(x) & (ahead(x) > -N + 1), (True, N - 1)),
    "window beyond the end": (lambda x: causal(x) & (ahead(x) > -N), (True, None)),
    "both sides": (lambda x: ahead(x).abs() <= 3, (False, 4)),
    "in four dims": (in_four_dims, (True, 5)),
    "looked up": (looked_up, (True, None)),
    "everything": (lambda x: ahead(x) < N, (False, None)),
}
KEPT: dict[str, Mask] = {
    "keys behind": lambda x: ahead(x) >= 0,
    "own key alone": lambda x: ahead(x) == 0,
    "not its own": lambda x: (ahead(x) <= 0) & (ahead(x) != -2),
    "unequal sides": lambda x: (ahead(x) <= 2) & (ahead(x) > -4),
    "chunks": lambda x: place(x) // 4 == (place(x) // 4)[:, None],
    "the first keys": lambda x: (place(x) < 4).expand(N, N),
    "causal from the third": lambda x: place(x) <= place(x)[:, None] + 3,
    "a bias": lambda x: -ahead(x).abs() * 0.5,
    "the least of float16": lambda x: torch.where(causal(x), 0.0, -65504.0),
    "of an input": lambda x: x[0, 0, :, :1] >= x[0, 0, :, 0],
}


def attend(x: Tensor, mask: Tensor) -> Tensor:
    out, _ = torch.ops.autopar.attention(x, x, x, mask, 0.0, False, None, 0)
    result: Tensor = out
    return result


def spelled(function: Callable[..., Tensor], *tensors: Tensor) -> GraphModule:
    """The graph of a function, as the pass gets it."""
    traced = make_fx(trace(function, *tensors), decomposition_table=decomposition_table(), tracing_mode="fake")
    return run_passes(traced(*tensors), [one_spelling], NO_BACKWARD)[0]


def read(mask: Mask, *others: Tensor) -> tuple[Node, GraphModule]:
    """The attention of what is left of a graph, and the graph."""
    x = torch.randn(2, 3, N, 4)

    def function(x: Tensor, *others: Tensor) -> Tensor:
        return attend(x, mask(x, *others))

    graph_module, _ = run_passes(spelled(function, x, *others), [read_masks, remove_dead_code], NO_BACKWARD)
    torch.testing.assert_close(graph_module(x, *others)[0], function(x, *others))
    (found,) = (node for node in graph_module.graph.nodes if node.target in ATTENTION)
    return found, graph_module


@pytest.mark.parametrize("name", READ)
def test_a_mask_that_constants_decide_leaves_the_graph(name: str) -> None:
    mask, (is_causal, window) = READ[name]
    node, graph_module = read(mask)
    assert arguments(node)[3] is None
    assert arguments(node)[5] is is_causal
    assert (*arguments(node)[8:], None)[0] == window
    assert len(graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.arange.start_step)) == 0


@pytest.mark.parametrize("name", KEPT)
def test_another_mask_stays(name: str) -> None:
    node, _ = read(KEPT[name])
    assert isinstance(arguments(node)[3], Node)
    assert arguments(node)[5] is False
    assert len(arguments(node)) == 8


def test_of_a_conjunction_what_an_input_decides_stays() -> None:
    padding = torch.rand(2, 1, 1, N) < 0.7
    document = torch.arange(N).expand(2, N) // 5

    def mask(x: Tensor, padding: Tensor, document: Tensor) -> Tensor:
        same = (document[:, :, None] == document[:, None])[:, None]
        return (causal(x) & padding & (ahead(x) > -6)).expand(2, 1, N, N) & same

    node, _ = read(mask, padding, document)
    rest = arguments(node)[3]
    assert rest.target is torch.ops.aten.bitwise_and.Tensor
    assert tuple(rest.meta["val"].shape) == (2, 1, N, N)
    assert arguments(node)[5] is True
    assert arguments(node)[8] == 6


def test_dims_that_are_added_to_a_conjunction_are_added_to_what_stays() -> None:
    document = torch.arange(N).expand(2, N) // 5

    def mask(x: Tensor, document: Tensor) -> Tensor:
        return ((document[:, :, None] == document[:, None]) & causal(x)).unsqueeze(1)

    node, _ = read(mask, document)
    rest = arguments(node)[3]
    assert tuple(rest.meta["val"].shape) == (2, 1, N, N)
    assert rest.target is torch.ops.aten.view.default
    assert arguments(node)[5] is True


def test_what_is_read_is_what_the_mask_holds() -> None:
    """All masks above, element by element, of those that i - j decides."""
    x = torch.randn(2, 3, N, 4)
    row, key = torch.arange(N)[:, None], torch.arange(N)
    count = 0
    for mask in (*KEPT.values(), *(mask for mask, _ in READ.values())):
        result = spelled(mask, x).graph.output_node().args[0][0]
        values = IndexValues((2, 3, N, N)).of(result)
        if values is not None:
            expected = mask(x)
            found = values[row - key + N - 1]
            torch.testing.assert_close(found.expand(expected.shape), expected)
            count += 1
    assert count >= 10


def test_a_mask_of_many_tokens_is_never_made() -> None:
    """131,072 tokens: 17 billion pairs."""
    x = torch.empty(1, 1, 131_072, 1, device="meta")

    def function(x: Tensor) -> Tensor:
        return attend(x, causal(x) & (ahead(x) > -1024))

    graph_module, _ = run_passes(spelled(function, x), [read_masks, remove_dead_code], NO_BACKWARD)
    (node,) = graph_module.graph.find_nodes(op="call_function", target=ATTENTION[0])
    assert arguments(node)[3:] == (None, 0.0, True, None, 0, 1024)

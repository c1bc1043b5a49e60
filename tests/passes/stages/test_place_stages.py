"""What the gradient of a parameter of several stages adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autopar.passes.stages.place_stages import _terms_of

aten = torch.ops.aten


def gradients(shapes: dict[str, tuple[int, ...]]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph with values of these shapes."""
    graph = fx.Graph()
    found = [graph.placeholder(name) for name in shapes]
    for node, shape in zip(found, shapes.values(), strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    return graph, found


def combined(graph: fx.Graph, target: Callable[..., Any], first: fx.Node, second: fx.Node) -> fx.Node:
    """An operator that reads two values, of the shape to which both broadcast."""
    node = graph.call_function(target, (first, second))
    node.meta["val"] = target(first.meta["val"], second.meta["val"])
    return node


def test_sums_of_sums_fall_apart_into_what_they_add() -> None:
    graph, (a, b, c) = gradients({"a": (4, 2), "b": (4, 2), "c": (4, 2)})
    inner = combined(graph, aten.add.Tensor, a, b)
    outer = combined(graph, aten.add.Tensor, inner, c)
    graph.output((outer,))
    dissolved: set[fx.Node] = set()
    assert _terms_of(outer, dissolved) == [a, b, c]
    assert dissolved == {inner, outer}


@pytest.mark.parametrize(("target", "second"), [(aten.mul.Tensor, (4, 2)), (aten.add.Tensor, (2,))])
def test_a_product_and_a_sum_that_broadcasts_stay_one_term(target: Callable[..., Any], second: tuple[int, ...]) -> None:
    """The factors of a product, or a row that is added to all, are no parts of the gradient."""
    graph, (a, b) = gradients({"a": (4, 2), "b": second})
    gradient = combined(graph, target, a, b)
    graph.output((gradient,))
    dissolved: set[fx.Node] = set()
    assert _terms_of(gradient, dissolved) == [gradient]
    assert not dissolved

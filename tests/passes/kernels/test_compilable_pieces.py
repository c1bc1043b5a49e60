"""Graphs in pieces: what is compiled, what crosses, and which pieces are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.passes.kernels.compilable_pieces import cut_into_pieces

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Writer:
    """Writes nodes with the operator that they belong to."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def __call__(self, operator: str, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["operator"] = operator
        return node

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule({}, self.graph)


def layers(count: int, target: Callable[..., Any] = aten.sin.default) -> fx.GraphModule:
    """Equal layers: a product, its sum over ranks, and two pointwise operators behind a view."""
    write = Writer()
    x, w = write.graph.placeholder("x"), write.graph.placeholder("w")
    for index in range(count):
        name = f"layers.{index}/op"
        total = write(name, c10d.all_reduce.default, write(name, aten.mm.default, x, w), "sum", "tp")
        seen = write(name, aten.view.default, write(name, c10d.wait_tensor.default, total), [4, 4])
        x = write(name, aten.mul.Tensor, write(name, target, seen), seen)
    return write.module(x)


def test_pieces_lie_between_collectives_and_equal_layers_have_equal_text() -> None:
    pieces = cut_into_pieces(layers(2))
    assert [piece.compiled for piece in pieces] == [False, True, False, True, False]
    assert pieces[1].text == pieces[3].text
    assert pieces[1].text != cut_into_pieces(layers(1, aten.cos.default))[1].text
    kinds = [str(node.target) for node in pieces[1].graph_module.graph.nodes if node.op == "call_function"]
    assert kinds == ["aten.view.default", "aten.sin.default", "aten.mul.Tensor"]  # the view goes with its readers


def test_values_end_with_the_last_piece_that_takes_them() -> None:
    pieces = cut_into_pieces(layers(2))
    assert ["w" in piece.ends for piece in pieces] == [False, False, True, False, False]
    assert ["x" in piece.ends for piece in pieces] == [True, False, False, False, False]


def test_a_block_ends_a_piece_and_a_single_kernel_is_not_compiled() -> None:
    write = Writer()
    x = write.graph.placeholder("x")
    first = write("layers.0/b", aten.cos.default, write("layers.0/a", aten.sin.default, x))
    second = write("layers.1/b", aten.cos.default, write("layers.1/a", aten.sin.default, first))
    last = write("head/a", aten.sin.default, second)
    pieces = cut_into_pieces(write.module(last, x))
    assert [piece.compiled for piece in pieces] == [True, True, False, False]
    assert pieces[0].text == pieces[1].text


def test_what_depends_on_data_is_not_compiled() -> None:
    write = Writer()
    x = write.graph.placeholder("x")
    write.graph.output(write("a", aten.nonzero.default, write("a", aten.cos.default, write("a", aten.sin.default, x))))
    pieces = cut_into_pieces(fx.GraphModule({}, write.graph))
    assert [piece.compiled for piece in pieces] == [True, False, False]


def test_the_salt_of_attention_that_drops_nothing_is_no_difference() -> None:
    def text(dropout: float, salt: int) -> str:
        write = Writer()
        x = write.graph.placeholder("x")
        twice = write("a", aten.add.Tensor, write("a", aten.sin.default, x), x)
        attention = torch.ops.autopar.attention.default
        write.graph.output(write("a", attention, twice, twice, twice, None, dropout, True, None, salt))
        return cut_into_pieces(fx.GraphModule({}, write.graph))[0].text

    assert text(0.0, 1) == text(0.0, 2)
    assert text(0.5, 1) != text(0.5, 2)

"""What computations of ours hold while they run."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.graphs.working_bytes import _measured, working_bytes
from autopar.ops import blocks, statistics
from autopar.ops.attention_operator import attention_by_index

ELEMENTS = 4 * 8 * 16
CHANNELS = 8 * 4


def _node(function: object, dtype: torch.dtype, *forms: tuple[int, ...] | int | float | None) -> fx.Node:
    """A call of operands of these shapes, blocks in `dtype` and statistics in fp32, and of other arguments."""
    graph = fx.Graph()
    arguments = []
    for number, form in enumerate(forms):
        if isinstance(form, tuple):
            operand = graph.placeholder(f"x{number}")
            operand.meta = {"local_shape": form, "dtype": dtype if len(form) == 3 else torch.float32}
            form = operand
        arguments.append(form)
    return graph.call_function(function, tuple(arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.bfloat16, 3)], ids=str)
def test_a_batch_norm_holds_wide_copies_of_its_block(dtype: torch.dtype, copies: int) -> None:
    """Gradients in fp32: normalised x beside the result. In bf16: two values of four bytes, less the result."""
    block, channels = (4, 8, 16), (8,)
    node = _node(statistics.batch_norm_gradients, dtype, block, block, channels, channels, channels, (2, 8), 64)
    assert abs(working_bytes(node) - copies * ELEMENTS * dtype.itemsize) <= 4 * CHANNELS


def test_joined_pieces_of_an_uneven_dim_hold_the_padding_too() -> None:
    joined = (blocks.pieces_joined, torch.float32, (8, 3, 4), [[1, 1, 2]], [4, 6, 4], [4, 5, 4])
    assert working_bytes(_node(*joined)) == 4 * 6 * 4 * 4


def test_a_product_in_float8_holds_its_rounded_operands() -> None:
    node = _node(torch.ops.autopar.mm_fp8_rowwise.default, torch.bfloat16, (64, 32), (32, 48))
    assert working_bytes(node) == 64 * 32 + 32 * 48


@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 0), (torch.bfloat16, 4)], ids=str)
def test_a_loss_in_chunks_holds_one_of_them(dtype: torch.dtype, total: int) -> None:
    """4096 rows of logits; backward in bf16 adds the gradient of weight up in fp32, beside the result. In bf16 logits
    and a copy of weight are filled up by 7 words."""
    rows, words, width = 8192, 50257, 768
    columns = words + (7 if total else 0)
    operands: list[tuple[torch.dtype, tuple[int, ...]]] = [(dtype, (rows, width)), (dtype, (words, width))]
    statistics = [(torch.int64, (rows,)), *[(torch.float32, (rows,))] * 3]
    forward, backward = torch.ops.autopar.linear_cross_entropy, torch.ops.autopar.linear_cross_entropy_backward
    chunk = 4096 * columns * dtype.itemsize
    filled = columns * width * dtype.itemsize if total else 0
    held = [_held(forward.default, operands + statistics[:1]), _held(backward.default, operands + statistics)]
    wanted = [pytest.approx(filled, abs=3 * 4 * rows), filled + total * columns * width]
    assert [bytes_ - chunk for bytes_ in held] == wanted


@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 0), (torch.bfloat16, 4)], ids=str)
@pytest.mark.parametrize(("inputs", "biases", "tensors"), [(2, 0, (3, 5)), (1, 1, (2, 3))])
def test_an_mlp_in_tiles_holds_one_of_them(
    dtype: torch.dtype, total: int, inputs: int, biases: int, tensors: tuple[int, int]
) -> None:
    """Hidden tensors of 4096 rows; backward in bf16 adds gradients of weights up in fp32, beside the results."""
    rows, width, hidden = 16384, 256, 1024
    graph = fx.Graph()

    def given(*shape: int) -> fx.Node:
        node = graph.placeholder("x")
        node.meta = {"local_shape": shape, "dtype": dtype}
        return node

    weights, vectors = [given(hidden, width) for _ in range(inputs)], [given(hidden) for _ in range(biases)]
    rest = (given(rows, width), weights, vectors, given(width, hidden), "gelu", False)
    forward, backward = torch.ops.autopar.tiled_mlp.default, torch.ops.autopar.tiled_mlp_backward.default
    calls = graph.call_function(forward, rest), graph.call_function(backward, (given(rows, width), *rest))
    tile, wide = 4096 * hidden * dtype.itemsize, total * hidden * ((inputs + 1) * width + biases)
    expected = [tensors[0] * tile, tensors[1] * tile + wide]
    assert [working_bytes(call) for call in calls] == [pytest.approx(one, abs=4 * hidden) for one in expected]


def test_a_ctc_loss_holds_a_table_for_its_longest_target() -> None:
    steps, batch, classes, target = 50, 4, 32, 10
    table = 4 * batch * steps * (2 * target + 1)
    given = (steps, batch, classes), (batch, target), (batch,), (batch,), 0
    forward, backward = torch.ops.autopar.ctc_loss.default, torch.ops.autopar.ctc_loss_backward.default
    assert working_bytes(_node(forward, torch.float32, *given, False)) == table
    assert working_bytes(_node(backward, torch.float32, (batch,), *given, False)) == 2 * table


def _held(function: object, operands: list[tuple[torch.dtype, tuple[int, ...]]]) -> int:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(len(operands))]
    for node, (dtype, shape) in zip(nodes, operands, strict=True):
        node.meta = {"local_shape": shape, "dtype": dtype}
    return working_bytes(graph.call_function(function, (*nodes, 0)))  # type: ignore[arg-type]


def test_kernels_of_torch_hold_nothing_more() -> None:
    assert working_bytes(_node(torch.ops.aten.mul.Tensor, torch.float32, (4, 8, 16), 2.0)) == 0


def test_operands_that_nobody_described_are_no_error() -> None:
    graph = fx.Graph()
    operand = graph.placeholder("x")
    operand.meta = {}
    assert working_bytes(graph.call_function(statistics.channel_sums, (operand,))) == 0


def test_the_salt_of_a_layer_is_no_reason_to_measure_again() -> None:
    block, shape = (2, 4, 8, 16), (2, 4, 32, 8)
    runs = (((0, 2),), ((0, 4),), ((8, 8),), ((0, 8),))

    def bytes_of(salt: int, scale: float) -> int:
        graph = fx.Graph()
        operands = [graph.placeholder(name) for name in ("query", "key", "value")]
        for operand in operands:
            operand.meta = {"local_shape": block, "dtype": torch.float32}
        arguments = (*operands, None, 0.0, True, scale, salt, None, runs, shape)
        return working_bytes(graph.call_function(attention_by_index, arguments))

    bytes_of(0, 0.5)
    measured = _measured.cache_info().misses
    assert bytes_of(7, 0.5) == bytes_of(0, 0.5) > 0
    assert _measured.cache_info().misses == measured
    bytes_of(7, 0.25)
    assert _measured.cache_info().misses == measured + 1

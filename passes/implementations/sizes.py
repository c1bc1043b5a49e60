"""Operators with sizes among their arguments: these become the local sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ops.strided import with_strides
from autopar.passes.implementations.local_context import LocalContext, replace_argument
from autopar.rules.call import tensor_operands


def _with_output_shape(name: str) -> Callable[[LocalContext, tuple[Any, ...], dict[str, Any]], fx.Node]:
    """The operator with argument `name` set to the local shape of its output."""

    def emit(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        target: Any = context.node.target
        return context.call_operator(*replace_argument(target, args, kwargs, name, list(context.output_shape())))

    return emit


def _repeat(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Local repetitions: local output size over local input size."""
    global_input = tuple(tensor_operands(context.node)[0].meta["val"].shape)
    output = context.output_shape()
    new = len(output) - len(global_input)
    inputs = (1,) * new + context.input_shape(0, global_input)
    local = [out // size for out, size in zip(output, inputs, strict=True)]
    return context.call_operator(*replace_argument(context.node.target, args, kwargs, "repeats", local))


def _arange(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The block of an arange is an arange; the step keeps its sign and the end is exact by construction."""
    names = {argument.name for argument in context.node.target._schema.arguments}  # type: ignore[union-attr]
    first = context.global_argument("start") if "start" in names else 0
    step = context.global_argument("step") if "step" in names else 1
    output = context.global_output()
    options = {"dtype": output.dtype, "device": output.device}
    early = step / 2 if output.dtype.is_floating_point else 0  # integers end exactly, floats may round past the end
    pieces = [
        context.call(
            torch.ops.aten.arange.start_step,
            first + step * start,
            first + step * (start + length) - early,
            step,
            **options,
        )
        for start, length in context.output_runs()[0]
    ]
    if len(pieces) == 1:
        return pieces[0]
    for piece, (_, length) in zip(pieces, context.output_runs()[0], strict=True):
        context.describe(piece, (length,), output.dtype)
    return context.call(torch.ops.aten.cat.default, pieces)


def _as_strided(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Strides count in the memory of the captured operand, which the whole local operand takes on."""
    value = context.global_argument("self").meta["val"]
    memory = context.call(with_strides, args[0], tuple(value.stride()))
    context.describe(memory, tuple(value.shape), value.dtype)
    offset = context.global_argument("storage_offset")
    relative = 0 if offset is None else offset - value.storage_offset()
    args, kwargs = replace_argument(context.node.target, (memory, *args[1:]), kwargs, "storage_offset", relative)
    return context.call_operator(args, kwargs)


def _view_as_complex(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The two parts of a number must be neighbours in memory, which a block need not keep."""
    value = context.global_argument("self").meta["val"]
    neighbours = context.call(torch.ops.aten.contiguous.default, args[0])
    context.describe(neighbours, context.input_shape(0, tuple(value.shape)), value.dtype)
    return context.call_operator((neighbours, *args[1:]), kwargs)


IMPLEMENTATIONS = {"offset_arange": _arange}
REWRITES = {
    "aten.expand.default": _with_output_shape("size"),
    "aten.full.default": _with_output_shape("size"),
    "aten.zeros.default": _with_output_shape("size"),
    "aten.ones.default": _with_output_shape("size"),
    "aten.empty.memory_format": _with_output_shape("size"),
    "aten.empty_permuted.default": _with_output_shape("size"),
    "aten.repeat.default": _repeat,
    "aten.diagonal_backward.default": _with_output_shape("input_sizes"),
    "aten.unfold_backward.default": _with_output_shape("input_sizes"),
    "aten.view_as_complex.default": _view_as_complex,
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_scatter.default": _as_strided,
}

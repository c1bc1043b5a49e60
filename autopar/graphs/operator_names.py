"""What an operator is to those who price it, by its bare name: a product, attention, a lookup, or memory traffic.

operator_kind(aten.mm.default) is "matmul"     operator_kind(gelu) is "memory"     base_name(gelu) is "gelu"
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal

import torch
from torch import fx

OperatorKind = Literal["matmul", "attention", "memory"]
"""Which rate bounds an operator."""

FLOAT8_PRODUCTS = ("mm_fp8_rowwise", "mm_fp8_tensorwise")
"""Products that round their operands to float8 first (`ops/float8.py`)."""
LINEAR_LOSSES = ("linear_cross_entropy", "linear_cross_entropy_backward")
"""Products whose logits a cross-entropy reads in chunks (`ops/linear_cross_entropy.py`)."""
TILED_MLPS = ("tiled_mlp", "tiled_mlp_backward")
"""The products of an MLP, whose hidden activations exist in tiles of rows (`ops/tiled_mlp.py`)."""
PRODUCTS = ("mm", "bmm", "convolution", "convolution_backward", "_grouped_mm", "expert_linear", "expert_outer",
            "sorted_expert_linear", "sorted_expert_outer",
            *FLOAT8_PRODUCTS, *LINEAR_LOSSES, *TILED_MLPS)  # fmt: skip

LOOKUPS = ("embedding", "gather", "index", "index_select", "_unsafe_index", "masked_embedding", "masked_gather",
           "rows_at")  # fmt: skip
"""Operators that read only the rows of their first operand that they return."""


PARTS = ("region", "piece", "strips", "trimmed", "rows_part", "row_chunk", "slice", "select")
"""Operators that read only as much as they return."""


@functools.cache
def base_name(target: object) -> str:
    """The bare operator name: aten.mm.default -> mm; of a function its own name."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))


def curve_name(target: object) -> str:
    """The name under which a profile has an operator's curve: what runs in its place has its rate.

    sorted_expert_linear  expert_linear        attention_by_index, ring_attention, attention_block  attention
    """
    name = base_name(target).removeprefix("sorted_").removesuffix("_by_index")
    return name.removeprefix("ring_").replace("attention_block", "attention")


def operator_kind(target: object) -> OperatorKind:
    """Which rate bounds an operator: "matmul" (also convolutions), "attention" or "memory"."""
    name = base_name(target)
    if "attention" in name:
        return "attention"
    return "matmul" if name in PRODUCTS else "memory"


def is_causal(node: fx.Node) -> bool:
    """Whether an attention call masks later keys by its `is_causal` argument."""
    return bool(_given(node, "is_causal"))


def window_of(node: fx.Node) -> int | None:
    """The `window` of an attention call: row i sees keys j with |i - j| < window; None for no attention, too."""
    window: int | None = _given(node, "window")
    return window


def _given(node: fx.Node, name: str) -> Any:
    """The value of an argument; None where it is not given."""
    names, arguments = argument_names(node.target), node.args
    if name not in names:
        return None
    position = names.index(name)
    return node.kwargs.get(name, arguments[position] if position < len(arguments) else None)


@functools.cache
def argument_names(target: object) -> tuple[str, ...]:
    """The arguments of an operator or of a function of ours."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    return tuple(inspect.signature(target).parameters) if inspect.isfunction(target) else ()

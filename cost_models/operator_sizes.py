"""Sizes of an operator as the models of `operators_*` need them, for one rank and for many strategies at once.

    mm (4096, 2048) @ (2048, 3072)                  ->  ProductSizes(m=4096, n=3072, k=2048)
    the same split over 4 ranks, by m, by n, by k   ->  m = (1024, 4096, 4096), n = (3072, 768, 3072), k = (..., 512)

Which dims a strategy splits is read off the parts that a rank holds: of the first operand m k, of the second k n, of
the result m n, and of the work m n k (times the batch), so the part of m is work / second operand, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.operators_memory import lookup_row
from autopar.graphs.operator_names import FLOAT8_PRODUCTS, LINEAR_LOSSES, TILED_MLPS

Floats: TypeAlias = NDArray[np.float64]
Shape: TypeAlias = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSizes:
    """`batch` products (m x k) @ (k x n) of one kernel; grouped: one per expert."""

    m: ArrayLike
    n: ArrayLike
    k: ArrayLike
    batch: ArrayLike = 1
    grouped: bool = False
    output_bytes: int = 0
    """Of one element of the result, where it is wider than the operands."""
    accumulates: bool = False
    """The result is added to what lies there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSizes:
    """`inputs` products (rows x width) @ (width x hidden), their activation, and (rows x hidden) @ (hidden x out)."""

    rows: ArrayLike
    hidden: ArrayLike
    width: int
    out: int
    inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Fused attention of `heads` heads of queries, of which `queries_per_key` share keys and values. causal: of the
    last queries of the keys, which see most."""

    batch: ArrayLike
    heads: ArrayLike
    queries_per_key: float
    queries: ArrayLike
    keys: ArrayLike
    qk_dim: int
    v_dim: int
    causal: bool
    backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """A kernel that memory bounds: its family, and the elements that one block of threads handles in turn."""

    family: str
    row: ArrayLike = 0


Sizes: TypeAlias = ProductSizes | MlpSizes | AttentionSizes | RowSizes

NORMS = ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
         "native_group_norm", "var_mean", "rms_norm", "add_rms_norm", "rms_norm_backward", "layer_norm",
         "add_layer_norm", "layer_norm_backward")  # fmt: skip
SOFTMAXES = ("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "cross_entropy",
             "cross_entropy_rows", "cross_entropy_backward")  # fmt: skip
ROW_LOOKUPS = ("embedding", "masked_embedding", "index_select")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Part of each operand, of the first result and of the work that a rank has: 1.0, or one per strategy."""

    operands: Sequence[ArrayLike]
    result: ArrayLike = 1.0
    work: ArrayLike = 1.0


def whole(operands: int) -> Parts:
    """The parts of an operator whose shapes are local already."""
    return Parts(operands=(1.0,) * operands)


EXPERT_LINEAR = ("expert_linear", "sorted_expert_linear")
EXPERT_OUTER = ("expert_outer", "sorted_expert_outer")


def has_sizes(name: str) -> bool:
    """Whether `sizes_of` may know an operator."""
    products = ("mm", "bmm", *FLOAT8_PRODUCTS, *LINEAR_LOSSES, *TILED_MLPS, *EXPERT_LINEAR, *EXPERT_OUTER)
    return name in (*products, *NORMS, *SOFTMAXES, *ROW_LOOKUPS) or "attention" in name


def sizes_of(name: str, operands: Sequence[Shape], result: Shape, parts: Parts, causal: bool = False) -> Sizes | None:
    """The sizes of an operator by its bare ATen name; None where no model but the roofline knows it.

    operands, result: global shapes, of which `parts` says what a rank has.
    """
    if name in ("mm", "bmm", *FLOAT8_PRODUCTS):
        return _product(operands, parts)
    if name in LINEAR_LOSSES:
        rows, words = (np.asarray(part, np.float64) for part in parts.operands[:2])
        return ProductSizes(
            m=np.maximum(1, rows * operands[0][0]), n=np.maximum(1, words * operands[1][0]), k=operands[0][1]
        )
    if name in TILED_MLPS:
        return _mlp(operands, parts, 1 if name.endswith("_backward") else 0)
    if name in EXPERT_LINEAR:
        return _experts(operands, result, parts)
    if name in EXPERT_OUTER:
        return _outer(operands, result, parts)
    if "attention" in name:
        return _attention(operands, result, parts, "backward" in name, causal)
    if name in NORMS or name in SOFTMAXES:
        family = "norm" if name in NORMS else "softmax"
        return RowSizes(family=family, row=operands[0][-1] if operands and operands[0] else 0)
    if name in ROW_LOOKUPS and len(operands) > 1:
        rows = np.prod(operands[1], dtype=np.float64) * np.asarray(parts.operands[1], np.float64)
        return RowSizes(family="lookup", row=lookup_row(rows, operands[0][-1]))
    return None


def flops_of(sizes: ProductSizes | AttentionSizes) -> Floats:
    """FLOPs of a product or of attention without its mask, a multiply-add as 2."""
    if isinstance(sizes, ProductSizes):
        m, n, k, batch = (np.asarray(size, np.float64) for size in (sizes.m, sizes.n, sizes.k, sizes.batch))
        return np.asarray(2 * m * n * k * batch)
    batch, heads, queries = (np.asarray(size, np.float64) for size in (sizes.batch, sizes.heads, sizes.queries))
    per_pair = 6 * sizes.qk_dim + 4 * sizes.v_dim if sizes.backward else 2 * (sizes.qk_dim + sizes.v_dim)
    return np.asarray(batch * heads * queries * np.asarray(sizes.keys, np.float64) * per_pair)


def _product(operands: Sequence[Shape], parts: Parts) -> ProductSizes | None:
    if len(operands) < 2 or len(operands[0]) < 2 or len(operands[1]) < 2:
        return None
    first, second = (np.asarray(part, np.float64) for part in parts.operands[:2])
    work, result = np.asarray(parts.work, np.float64), np.asarray(parts.result, np.float64)
    rows, columns, inner = work / second, work / first, work / result
    batched = len(operands[0]) == 3
    batch = work / (rows * columns * inner) * (operands[0][0] if batched else 1)
    return ProductSizes(
        m=np.maximum(1, rows * operands[0][-2]),
        n=np.maximum(1, columns * operands[1][-1]),
        k=np.maximum(1, inner * operands[0][-1]),
        batch=np.maximum(1, batch) if batched else 1,
    )


def _mlp(operands: Sequence[Shape], parts: Parts, at: int) -> MlpSizes:
    """x (rows, width) at place `at`, behind it weights, biases and the last weight, either way round."""
    rows, hidden = (np.asarray(part, np.float64) for part in parts.operands[at : at + 2])
    (count, width), *parameters = operands[at:]
    first, *matrices, last = (math.prod(shape) for shape in parameters if len(shape) == 2)
    return MlpSizes(
        rows=np.maximum(1, rows * count),
        hidden=np.maximum(1, hidden * (first // width)),
        width=width,
        out=last * width // first,
        inputs=1 + len(matrices),
    )


def _experts(operands: Sequence[Shape], result: Shape, parts: Parts) -> ProductSizes | None:
    """rows (t, k), weights (experts, ., .): each expert multiplies its share of the rows, evenly routed."""
    if len(operands) < 2 or len(operands[1]) != 3 or len(operands[0]) != 2:
        return None
    first, second = (np.asarray(part, np.float64) for part in parts.operands[:2])
    work, out = np.asarray(parts.work, np.float64), np.asarray(parts.result, np.float64)
    rows = work / second
    inner, columns = first / rows, out / rows
    experts = np.maximum(1, operands[1][0] * work / (rows * inner * columns))
    return ProductSizes(
        m=np.maximum(1, rows * operands[0][0] / operands[1][0]),
        n=np.maximum(1, columns * result[-1]),
        k=np.maximum(1, inner * operands[0][-1]),
        batch=experts,
        grouped=True,
    )


def _outer(operands: Sequence[Shape], result: Shape, parts: Parts) -> ProductSizes | None:
    """rows (t, m), rows (t, n) -> (experts, m, n): gradients of the weights of every expert, evenly routed."""
    if len(operands) < 2 or len(operands[0]) != 2 or len(operands[1]) != 2 or len(result) != 3:
        return None
    first, second = (np.asarray(part, np.float64) for part in parts.operands[:2])
    work, out = np.asarray(parts.work, np.float64), np.asarray(parts.result, np.float64)
    rows = work / out
    left, right = first / rows, second / rows
    sides = [left * operands[0][-1], right * operands[1][-1]]
    m, n = sides if result[1] == operands[0][-1] else reversed(sides)  # the other way round where it is transposed
    return ProductSizes(
        m=np.maximum(1, m),
        n=np.maximum(1, n),
        k=np.maximum(1, rows * operands[0][0] / result[0]),
        batch=np.maximum(1, result[0] * out / (left * right)),
        grouped=True,
    )


ROWS_PER_BLOCK = 128
"""Rows of queries that one unit works on: a sequence is not cut finer while there are heads to cut."""


def _attention(
    operands: Sequence[Shape], result: Shape, parts: Parts, backward: bool, causal: bool
) -> AttentionSizes | None:
    at = 1 if backward else 0
    if len(operands) < at + 3 or any(len(shape) != 4 for shape in operands[at : at + 3]):
        return None
    query, key, value = operands[at : at + 3]
    work, keys_part = np.asarray(parts.work, np.float64), np.asarray(parts.operands[at + 1], np.float64)
    # what splits queries and not keys is a split of the sequence, or of the queries that share a head of keys
    beyond = work / keys_part
    by_sequence = np.maximum(beyond, min(1.0, ROWS_PER_BLOCK / query[2]))
    share = keys_part * beyond / by_sequence  # of batch times heads, of which the models see the product only
    batch = np.maximum(1, query[0] * share)
    return AttentionSizes(
        batch=batch,
        heads=np.maximum(1, query[0] * query[1] * share / batch),
        queries_per_key=query[1] / key[1],
        queries=np.maximum(1, query[2] * by_sequence),
        keys=key[2],
        qk_dim=query[3],
        v_dim=value[3],
        causal=causal,
        backward=backward,
    )

"""Attention in Triton where torch has no fused kernel: dropout by global index, a mask over some of several batch dims,
the gradient of a mask.

The functions have the signatures of the references in `autopar.ops.indexed_attention`. Forward keeps a running maximum
and sum per row; backward reads the logsumexp and takes one pass by keys (gradients of keys and values) and one by rows
(gradients of queries and of the mask, which programs add to one buffer). Nothing of the size of the scores is stored
but a mask and its gradient, where these have that size. A row that sees nothing gives zeros. To Triton a pointer or a
number is a `tl.tensor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops.random_index import drop_threshold

LANES = tl.constexpr(4)
NOTHING = tl.constexpr(float("-inf"))
LEAST_DOT = 16
"""What a side of a product in Triton must have."""


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(x: tl.tensor, at: tl.tensor, stride: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr,
            BLOCK: tl.constexpr) -> tl.tensor:  # fmt: skip
    """The rows `at` of a matrix of `count` rows of WIDTH, filled up with zeros to BLOCK columns."""
    to = tl.arange(0, BLOCK)
    inside = (at[:, None] < count) & (to[None, :] < WIDTH)
    return tl.load(x + at[:, None] * stride + to[None, :], mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(x: tl.tensor, values: tl.tensor, at: tl.tensor, stride: tl.tensor, count: tl.tensor,
               WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:  # fmt: skip
    """The inverse of `rows_of`."""
    to = tl.arange(0, BLOCK)
    inside = (at[:, None] < count) & (to[None, :] < WIDTH)
    tl.store(x + at[:, None] * stride + to[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def masked_scores(
    query: tl.tensor, key: tl.tensor, mask: tl.tensor, at: tl.tensor, to: tl.tensor, row: tl.tensor, column: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, mask_row: tl.tensor, mask_column: tl.tensor, scale: tl.tensor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scores of a tile in fp32, -inf for pairs that are not there. at, to: local rows and keys; row, column:
    global; WINDOW: 0 for none."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    there = (at[:, None] < queries) & (to[None, :] < keys)
    if MASK > 0:
        added = tl.load(mask + at[:, None] * mask_row + to[None, :] * mask_column, mask=there, other=0)
        if MASK == 2:
            there = there & (added != 0)
        else:
            scores += added.to(tl.float32)
    ahead = column.to(tl.int32)[None, :] - row.to(tl.int32)[:, None]
    if CAUSAL:
        there = there & (ahead <= 0)
    if WINDOW > 0:
        there = there & (ahead > -WINDOW)
        if not CAUSAL:
            there = there & (ahead < WINDOW)
    return tl.where(there, scores, NOTHING)


@triton.jit  # type: ignore[untyped-decorator]
def kept_pairs(
    start: tl.tensor, width: tl.tensor, row: tl.tensor, column: tl.tensor, seed: tl.tensor, salt: tl.tensor,
    threshold: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which pairs of a tile dropout keeps, by the numbers of its elements; ALIGNED: the keys of a tile are neighbours
    and begin at a multiple of 4, so that one counter serves four of them."""
    if ALIGNED:
        group = tl.arange(0, COLUMNS // 4) * 4
        first = tl.min(column, axis=0)
        counters = (start + row[:, None] * width + first + group[None, :]) // LANES
        zero = counters * 0
        one, two, three, four = tl.philox(
            seed, (counters & 0xFFFFFFFF).to(tl.uint32), (counters >> 32).to(tl.uint32), (zero + salt).to(tl.uint32),
            zero.to(tl.uint32),
        )  # fmt: skip
        words = tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), (ROWS, COLUMNS))
    else:
        number = start + row[:, None] * width + column[None, :]
        counters = number // LANES
        zero = counters * 0
        one, two, three, four = tl.philox(
            seed, (counters & 0xFFFFFFFF).to(tl.uint32), (counters >> 32).to(tl.uint32), (zero + salt).to(tl.uint32),
            zero.to(tl.uint32),
        )  # fmt: skip
        lane = number % LANES
        words = tl.where(lane < 2, tl.where(lane == 0, one, two), tl.where(lane == 2, three, four))
    return words.to(tl.int64) >= threshold


@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, mask: tl.tensor, row_index: tl.tensor, key_index: tl.tensor,
    starts: tl.tensor, seed: tl.tensor, out: tl.tensor, logsumexp: tl.tensor,
    heads: tl.tensor, groups: tl.tensor, inner: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    mask_outer: tl.tensor, mask_inner: tl.tensor, mask_head: tl.tensor, mask_row: tl.tensor, mask_column: tl.tensor,
    scale: tl.tensor, width: tl.tensor, salt: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """One program per ROWS rows of a head."""
    matrix = tl.program_id(1).to(tl.int64)
    batch, head = matrix // heads, matrix % heads
    own = batch * groups + head // (heads // groups)
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(row_index + at, mask=at < queries, other=0)
    q = rows_of(query + matrix * queries * WIDTH, at, WIDTH, queries, WIDTH, BLOCK)
    masked = mask + batch // inner * mask_outer + batch % inner * mask_inner + head * mask_head
    start = tl.load(starts + matrix)
    drawn = tl.load(seed)
    top = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, BLOCK_VALUES), tl.float32)
    for first in range(0, keys, KEYS):
        to = first + tl.arange(0, KEYS)
        column = tl.load(key_index + to, mask=to < keys, other=0)
        k = rows_of(key + own * keys * WIDTH, to, WIDTH, keys, WIDTH, BLOCK)
        scores = masked_scores(q, k, masked, at, to, row, column, queries, keys, mask_row, mask_column, scale, CAUSAL,
                               WINDOW, MASK, PRECISION)  # fmt: skip
        new = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new == NOTHING, 0.0, new)
        weights = tl.exp(scores - base[:, None])
        shrunk = tl.exp(top - base)
        total = total * shrunk + tl.sum(weights, axis=1)
        if DROP:
            column = first + tl.load(key_index) + tl.arange(0, KEYS) if ALIGNED else column
            keep = kept_pairs(start, width, row, column, drawn, salt, threshold, ROWS, KEYS, ALIGNED)
            weights = tl.where(keep, weights * kept_scale, 0.0)
        v = rows_of(value + own * keys * VALUES, to, VALUES, keys, VALUES, BLOCK_VALUES)
        result = result * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new
    sees = total > 0
    result = tl.where(sees[:, None], result / tl.where(sees, total, 1.0)[:, None], 0.0)
    store_rows(out + matrix * queries * VALUES, result, at, VALUES, queries, VALUES, BLOCK_VALUES)
    sums = tl.where(sees, tl.where(sees, top, 0.0) + tl.log(tl.where(sees, total, 1.0)), NOTHING)
    tl.store(logsumexp + matrix * queries + at, sums, mask=at < queries)


@triton.jit  # type: ignore[untyped-decorator]
def keys_kernel(
    grad: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor, mask: tl.tensor, row_index: tl.tensor,
    key_index: tl.tensor, starts: tl.tensor, seed: tl.tensor, logsumexp: tl.tensor, delta: tl.tensor,
    grad_key: tl.tensor, grad_value: tl.tensor,
    heads: tl.tensor, groups: tl.tensor, inner: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    mask_outer: tl.tensor, mask_inner: tl.tensor, mask_head: tl.tensor, mask_row: tl.tensor, mask_column: tl.tensor,
    scale: tl.tensor, width: tl.tensor, salt: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of KEYS keys and values of a group of heads: one program adds up all its heads and rows."""
    own = tl.program_id(1).to(tl.int64)
    batch, group = own // groups, own % groups
    to = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    column = tl.load(key_index + to, mask=to < keys, other=0)
    numbered = tl.program_id(0).to(tl.int64) * KEYS + tl.load(key_index) + tl.arange(0, KEYS) if ALIGNED else column
    k = rows_of(key + own * keys * WIDTH, to, WIDTH, keys, WIDTH, BLOCK)
    v = rows_of(value + own * keys * VALUES, to, VALUES, keys, VALUES, BLOCK_VALUES)
    drawn = tl.load(seed)
    of_keys = tl.zeros((KEYS, BLOCK), tl.float32)
    of_values = tl.zeros((KEYS, BLOCK_VALUES), tl.float32)
    for member in range(0, heads // groups):
        head = group * (heads // groups) + member
        matrix = batch * heads + head
        masked = mask + batch // inner * mask_outer + batch % inner * mask_inner + head * mask_head
        start = tl.load(starts + matrix)
        for first in range(0, queries, ROWS):
            at = first + tl.arange(0, ROWS)
            row = tl.load(row_index + at, mask=at < queries, other=0)
            q = rows_of(query + matrix * queries * WIDTH, at, WIDTH, queries, WIDTH, BLOCK)
            g = rows_of(grad + matrix * queries * VALUES, at, VALUES, queries, VALUES, BLOCK_VALUES)
            sums = tl.load(logsumexp + matrix * queries + at, mask=at < queries, other=NOTHING)
            scores = masked_scores(q, k, masked, at, to, row, column, queries, keys, mask_row, mask_column, scale,
                                   CAUSAL, WINDOW, MASK, PRECISION)  # fmt: skip
            weights = tl.exp(scores - tl.where(sums == NOTHING, 0.0, sums)[:, None])
            of_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            kept = weights
            if DROP:
                keep = kept_pairs(start, width, row, numbered, drawn, salt, threshold, ROWS, KEYS, ALIGNED)
                kept = tl.where(keep, weights * kept_scale, 0.0)
                of_weights = tl.where(keep, of_weights * kept_scale, 0.0)
            of_values += tl.dot(tl.trans(kept.to(g.dtype)), g, input_precision=PRECISION)
            less = tl.load(delta + matrix * queries + at, mask=at < queries, other=0.0)
            of_scores = weights * (of_weights - less[:, None])
            of_keys += tl.dot(tl.trans(of_scores.to(q.dtype)), q, input_precision=PRECISION)
    store_rows(grad_key + own * keys * WIDTH, of_keys * scale, to, WIDTH, keys, WIDTH, BLOCK)
    store_rows(grad_value + own * keys * VALUES, of_values, to, VALUES, keys, VALUES, BLOCK_VALUES)


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(
    grad: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor, mask: tl.tensor, row_index: tl.tensor,
    key_index: tl.tensor, starts: tl.tensor, seed: tl.tensor, logsumexp: tl.tensor, delta: tl.tensor,
    grad_query: tl.tensor, grad_mask: tl.tensor,
    heads: tl.tensor, groups: tl.tensor, inner: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    mask_outer: tl.tensor, mask_inner: tl.tensor, mask_head: tl.tensor, mask_row: tl.tensor, mask_column: tl.tensor,
    grad_outer: tl.tensor, grad_inner: tl.tensor, grad_head: tl.tensor, grad_row: tl.tensor, grad_column: tl.tensor,
    scale: tl.tensor, width: tl.tensor, salt: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WITH_MASK: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of ROWS queries of a head, and, WITH_MASK, their part of that of the mask."""
    matrix = tl.program_id(1).to(tl.int64)
    batch, head = matrix // heads, matrix % heads
    own = batch * groups + head // (heads // groups)
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(row_index + at, mask=at < queries, other=0)
    q = rows_of(query + matrix * queries * WIDTH, at, WIDTH, queries, WIDTH, BLOCK)
    g = rows_of(grad + matrix * queries * VALUES, at, VALUES, queries, VALUES, BLOCK_VALUES)
    sums = tl.load(logsumexp + matrix * queries + at, mask=at < queries, other=NOTHING)
    less = tl.load(delta + matrix * queries + at, mask=at < queries, other=0.0)
    masked = mask + batch // inner * mask_outer + batch % inner * mask_inner + head * mask_head
    added = grad_mask + batch // inner * grad_outer + batch % inner * grad_inner + head * grad_head
    start = tl.load(starts + matrix)
    drawn = tl.load(seed)
    of_query = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, keys, KEYS):
        to = first + tl.arange(0, KEYS)
        column = tl.load(key_index + to, mask=to < keys, other=0)
        k = rows_of(key + own * keys * WIDTH, to, WIDTH, keys, WIDTH, BLOCK)
        v = rows_of(value + own * keys * VALUES, to, VALUES, keys, VALUES, BLOCK_VALUES)
        scores = masked_scores(q, k, masked, at, to, row, column, queries, keys, mask_row, mask_column, scale, CAUSAL,
                               WINDOW, MASK, PRECISION)  # fmt: skip
        weights = tl.exp(scores - tl.where(sums == NOTHING, 0.0, sums)[:, None])
        of_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        if DROP:
            column = first + tl.load(key_index) + tl.arange(0, KEYS) if ALIGNED else column
            keep = kept_pairs(start, width, row, column, drawn, salt, threshold, ROWS, KEYS, ALIGNED)
            of_weights = tl.where(keep, of_weights * kept_scale, 0.0)
        of_scores = weights * (of_weights - less[:, None])
        if WITH_MASK:
            there = (at[:, None] < queries) & (to[None, :] < keys)
            tl.atomic_add(added + at[:, None] * grad_row + to[None, :] * grad_column, of_scores, mask=there)
        of_query += tl.dot(of_scores.to(k.dtype), k, input_precision=PRECISION)
    store_rows(grad_query + matrix * queries * WIDTH, of_query * scale, at, WIDTH, queries, WIDTH, BLOCK)


TILES = (
    (64, 2, (32, 64, 8)),
    (128, 2, (16, 32, 4)),
    (256, 2, (16, 32, 8)),
    (64, 4, (16, 32, 8)),
    (128, 4, (16, 32, 8)),
    (256, 4, (16, 16, 8)),
)
"""(largest head, bytes of an element, (rows, keys, warps) of a tile): what fits the registers of a program with a mask,
its gradient and dropout, on sm_80, sm_90 and sm_100. None was timed."""


def tile_of(width: int, element_bytes: int) -> tuple[int, int, int]:
    """(rows, keys, warps) of a tile for heads of `width`."""
    return next(tile for largest, size, tile in TILES if width <= largest and size == element_bytes)


def indexed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, inner: int, is_causal: bool, scale: float,
    rows: Tensor, keys: Tensor, dropout_p: float, seed: Tensor | None, salt: int, starts: Tensor, width: int,
    aligned: bool, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `indexed_attention_reference`."""
    query, key, value = (x.contiguous() for x in (query, key, value))
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
    tile = tile_of(max(query.shape[-1], value.shape[-1]), query.element_size())
    call = _arguments(query, key, value, mask, inner, scale, dropout_p, salt, width)
    grid = (triton.cdiv(query.shape[2], tile[0]), query.shape[0] * query.shape[1])
    forward_kernel[grid](
        query, key, value, _or(mask, query), rows, keys, starts, _or(seed, rows), out, logsumexp, *call,
        **_constants(query, value, mask, is_causal, window, dropout_p, aligned, tile),
    )  # fmt: skip
    return out, logsumexp


def indexed_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, logsumexp: Tensor,
    inner: int, is_causal: bool, scale: float, rows: Tensor, keys: Tensor, dropout_p: float, seed: Tensor | None,
    salt: int, starts: Tensor, width: int, aligned: bool, with_mask: bool, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `indexed_attention_backward_reference`."""
    delta = (grad.float() * out.float()).sum(-1).contiguous()
    grad, query, key, value = (x.contiguous() for x in (grad, query, key, value))
    logsumexp = logsumexp.contiguous()
    grads = [torch.empty_like(x) for x in (query, key, value)]
    of_mask = query.new_zeros(mask.shape if with_mask and mask is not None else (0,), dtype=torch.float32)
    tile = tile_of(max(query.shape[-1], value.shape[-1]), query.element_size())
    call = _arguments(query, key, value, mask, inner, scale, dropout_p, salt, width)
    constants = _constants(query, value, mask, is_causal, window, dropout_p, aligned, tile)
    tensors = (grad, query, key, value, _or(mask, query), rows, keys, starts, _or(seed, rows), logsumexp, delta)
    batch, heads, queries = query.shape[:3]
    keys_kernel[triton.cdiv(key.shape[2], tile[1]), batch * key.shape[1]](
        *tensors, grads[1], grads[2], *call, **constants
    )
    strides = _strides(of_mask) if with_mask else (0,) * 5
    rows_kernel[triton.cdiv(queries, tile[0]), batch * heads](
        *tensors, grads[0], of_mask, *call[:10], *strides, *call[10:], **constants, WITH_MASK=with_mask
    )
    return grads[0], grads[1], grads[2], of_mask.to(mask.dtype if with_mask and mask is not None else query.dtype)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that no program follows, where there is no tensor."""
    return other if x is None else x.view(torch.int8) if x.dtype == torch.bool else x


def _strides(mask: Tensor | None) -> tuple[int, ...]:
    """Of the five dims (outer, inner, heads, rows, keys); 0 along those over which the mask broadcasts."""
    if mask is None:
        return (0,) * 5
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))


def _arguments(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, inner: int, scale: float,
               dropout_p: float, salt: int, width: int) -> tuple[float, ...]:  # fmt: skip
    kept_scale = 0.0 if dropout_p >= 1.0 else 1.0 / (1.0 - dropout_p)
    sizes = (query.shape[1], key.shape[1], inner, query.shape[2], key.shape[2])
    return (*sizes, *_strides(mask), scale, width, salt, drop_threshold(dropout_p), kept_scale)


def _constants(query: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, window: int | None,
               dropout_p: float, aligned: bool, tile: tuple[int, int, int]) -> dict[str, object]:  # fmt: skip
    kind = 0 if mask is None else 2 if mask.dtype == torch.bool else 1
    return {
        "WIDTH": query.shape[-1], "VALUES": value.shape[-1], "ROWS": tile[0], "KEYS": tile[1],
        "BLOCK": max(LEAST_DOT, triton.next_power_of_2(query.shape[-1])),
        "BLOCK_VALUES": max(LEAST_DOT, triton.next_power_of_2(value.shape[-1])),
        "CAUSAL": is_causal, "WINDOW": window or 0, "MASK": kind, "DROP": dropout_p > 0.0, "ALIGNED": aligned,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32", "num_warps": tile[2],
    }  # fmt: skip

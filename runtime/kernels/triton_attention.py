"""Attention in Triton where torch has no fused kernel: dropout by global index, a mask over some of several batch dims,
the gradient of a mask.

The functions have the signatures of the references in `autopar.ops.indexed_attention`. Forward keeps a running maximum
and sum per row; backward reads the logsumexp and takes one pass by rows (gradients of queries and of the mask, which
programs add to one buffer) and one by keys (gradients of keys and values). Nothing of the size of the scores is stored
but a mask and its gradient, where these have that size. A row that sees nothing gives zeros.

A program looks up which tiles its indices see: those that nobody sees it leaves out, and those that are seen whole it
computes without comparing indices. Scores are powers of 2, their scale times log2(e). Operands are read by their
strides and results lie in memory as (B, S, H, D), so that heads that a product wrote, or that the next one takes, are
not copied. Places within a matrix are counted in 32 bits, numbers of elements in 64. To Triton a pointer or a number is
a `tl.tensor`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops.attention_formulas import empty_by_sequence, store_by_sequence
from autopar.ops.philox import WORD
from autopar.ops.random_index import drop_threshold
from autopar.runtime.kernels.drawn_words import four_words, zeros_in_place

NOTHING = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(math.log2(math.e))
BEYOND = tl.constexpr(2**31 - 1)
"""More than any index."""
PLACES = tl.constexpr(1024)
"""Indices that a program looks at together."""
LEAST_DOT = 16
"""What a side of a product in Triton must have."""


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(x: tl.tensor, first: tl.tensor, place: tl.tensor, count: tl.tensor, STRIDE: tl.constexpr,
            WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:  # fmt: skip
    """The rows first + place of a matrix of `count` rows of WIDTH, STRIDE elements apart, with zeros up to BLOCK
    columns."""
    to = tl.arange(0, BLOCK)
    inside = (first + place)[:, None] < count
    if WIDTH < BLOCK:
        inside = inside & (to[None, :] < WIDTH)
    lies = tl.cast(first, tl.int64) * STRIDE
    return tl.load(x + lies + place[:, None] * STRIDE + to[None, :], mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(x: tl.tensor, values: tl.tensor, first: tl.tensor, place: tl.tensor, count: tl.tensor, stride: tl.tensor,
               WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:  # fmt: skip
    """The inverse of `rows_of`."""
    to = tl.arange(0, BLOCK)
    inside = ((first + place)[:, None] < count) & (to[None, :] < WIDTH)
    lies = tl.cast(first, tl.int64) * stride
    tl.store(x + lies + place[:, None] * stride + to[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def places(index: tl.tensor, count: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """(first, one behind the last) place among `count` whose index is in [low, high]; (count, 0) for none."""
    begin = tl.full((PLACES,), BEYOND, tl.int32)
    end = tl.zeros((PLACES,), tl.int32)
    for first in range(0, count, PLACES):
        place = first + tl.arange(0, PLACES)
        value = tl.load(index + place, mask=place < count, other=0).to(tl.int32)
        found = (place < count) & (value >= low) & (value <= high)
        begin = tl.minimum(begin, tl.where(found, place, BEYOND))
        end = tl.maximum(end, tl.where(found, place + 1, 0))
    return tl.minimum(tl.min(begin, axis=0), count), tl.max(end, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def extremes(index: tl.tensor, at: tl.tensor, count: tl.tensor) -> tl.tensor:
    """(least, largest) of the indices at the places `at`."""
    value = tl.load(index + at, mask=at < count, other=0).to(tl.int32)
    return tl.min(tl.where(at < count, value, BEYOND), axis=0), tl.max(tl.where(at < count, value, -1), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def masked_scores(
    scores: tl.tensor, mask: tl.tensor, at: tl.tensor, to: tl.tensor, row: tl.tensor, column: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, mask_row: tl.tensor, mask_column: tl.tensor, scale: tl.tensor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scores of a tile of products in fp32, times log2(e), -inf for pairs that are not there. at, to: local rows and
    keys along their dim; row, column: global; WINDOW: 0 for none; WHOLE: indices hide nothing."""
    scores = scores * (scale * LOG2_E)
    if MASK > 0:
        there = (at < queries) & (to < keys)
        added = tl.load(mask + at.to(tl.int64) * mask_row + to.to(tl.int64) * mask_column, mask=there, other=0)
        if MASK == 2:
            scores = tl.where(there & (added != 0), scores, NOTHING)
        else:
            scores += added.to(tl.float32) * LOG2_E
    if not WHOLE:
        there = (to < keys) & (at < queries)
        ahead = column.to(tl.int32) - row.to(tl.int32)
        if CAUSAL:
            there = there & (ahead <= 0)
        if WINDOW > 0:
            there = there & (ahead > -WINDOW)
            if not CAUSAL:
                there = there & (ahead < WINDOW)
        scores = tl.where(there, scores, NOTHING)
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def places_of_keys(KEYS: tl.constexpr, FOURS: tl.constexpr) -> tl.tensor:
    """The places of the keys of a tile from its first. FOURS: in the order in which the lanes that hold a product have
    four neighbours each: they hold elements 0, 1, 8, 9 of 16, or 2, 3, 10, 11, and so on."""
    place = tl.arange(0, KEYS)
    if FOURS:
        place = (place & -16) + (place & 6) * 2 + (place & 8) // 4 + (place & 1)
    return place


@triton.jit  # type: ignore[untyped-decorator]
def kept_pairs(
    weights: tl.tensor, number: tl.tensor, first: tl.tensor, column: tl.tensor, seed: tl.tensor, salt: tl.tensor,
    threshold: tl.tensor, ROWS: tl.constexpr, KEYS: tl.constexpr, ALIGNED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which pairs of a tile dropout keeps. number: of each row, that of its element at column 0, or, ALIGNED, at key 0:
    keys are neighbours there, in the order of `places_of_keys` from the place `first`, and the number is a multiple of
    4, so that one counter serves four of them, in the lane that holds their weights."""
    least = tl.cast(threshold, tl.uint32)
    if ALIGNED:
        fours = tl.permute(tl.reshape(weights, (ROWS, KEYS // 16, 2, 4, 2)), (0, 1, 3, 4, 2))
        group = first // 4 + tl.arange(0, KEYS // 16)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        one, two, three, four = four_words((number >> 2)[:, None, None] + group + zeros_in_place(fours), salt, seed)
        kept = tl.join(tl.join(one >= least, three >= least), tl.join(two >= least, four >= least))
        return tl.reshape(tl.permute(kept, (0, 1, 3, 2, 4)), (ROWS, KEYS))
    else:
        numbers = number[:, None] + column[None, :]
        one, two, three, four = four_words(numbers >> 2, salt, seed)
        lane = numbers.to(tl.int32) & 3
        return tl.where(lane < 2, tl.where(lane == 0, one, two), tl.where(lane == 2, three, four)) >= least


@triton.jit  # type: ignore[untyped-decorator]
def seen_keys(
    row_index: tl.tensor, key_index: tl.tensor, at: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(begin, whole, end): the rows `at` see keys from begin to end, all of them up to whole, a multiple of KEYS."""
    least, largest = extremes(row_index, at, queries)
    begin, whole, end = 0, keys // KEYS * KEYS, keys
    if CAUSAL or WINDOW > 0:
        low = least - (WINDOW - 1) if WINDOW > 0 else -1
        begin, end = places(key_index, keys, low, largest if CAUSAL else largest + (WINDOW - 1))
        begin = begin // KEYS * KEYS
        if WINDOW > 0:
            whole = begin
        else:
            ahead, _ = places(key_index, keys, least + 1, BEYOND)
            whole = ahead // KEYS * KEYS
    return begin, whole, end


@triton.jit  # type: ignore[untyped-decorator]
def seeing_rows(
    row_index: tl.tensor, key_index: tl.tensor, to: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    ROWS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(begin, whole, end): rows from begin to end see the keys `to`, all of them from whole, a multiple of ROWS."""
    begin, whole, end = 0, 0, queries
    if CAUSAL or WINDOW > 0:
        least, largest = extremes(key_index, to, keys)
        low = least if CAUSAL else least - (WINDOW - 1)
        begin, end = places(row_index, queries, low, largest + (WINDOW - 1) if WINDOW > 0 else BEYOND)
        begin = begin // ROWS * ROWS
        if WINDOW > 0:
            whole = tl.maximum(begin, tl.cdiv(end, ROWS) * ROWS)
        else:
            _, behind = places(row_index, queries, -1, largest - 1)
            whole = tl.maximum(begin, tl.cdiv(behind, ROWS) * ROWS)
    return begin, whole, end


@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, mask: tl.tensor, row_index: tl.tensor, key_index: tl.tensor,
    starts: tl.tensor, seed: tl.tensor, out: tl.tensor, logsumexp: tl.tensor,
    query_batch: tl.tensor, query_head: tl.tensor, key_batch: tl.tensor, key_head: tl.tensor,
    value_batch: tl.tensor, value_head: tl.tensor,
    heads: tl.tensor, groups: tl.tensor, inner: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    mask_outer: tl.tensor, mask_inner: tl.tensor, mask_head: tl.tensor, mask_row: tl.tensor, mask_column: tl.tensor,
    scale: tl.tensor, width: tl.tensor, salt: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    QUERY_ROW: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """One program per ROWS rows of a head."""
    matrix = tl.program_id(1).to(tl.int64)
    batch, head = matrix // heads, matrix % heads
    group = head // (heads // groups)
    place = tl.arange(0, ROWS)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # long causal rows first
    at = first_row + place
    row = tl.load(row_index + at, mask=at < queries, other=0)
    begin, whole, end = seen_keys(row_index, key_index, at, queries, keys, KEYS, CAUSAL, WINDOW)
    query += batch * query_batch + head * query_head
    q = rows_of(query, first_row, place, queries, QUERY_ROW, WIDTH, BLOCK)
    key += batch * key_batch + group * key_head
    value += batch * value_batch + group * value_head
    mask += batch // inner * mask_outer + batch % inner * mask_inner + head * mask_head
    number = tl.load(starts + matrix) + row * width
    if ALIGNED:
        number += tl.load(key_index)
    drawn = tl.load(seed)
    top = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, BLOCK_VALUES), tl.float32)
    for part in tl.static_range(1 if WINDOW > 0 else 0, 2):
        for first in tl.range(begin if part == 0 else tl.maximum(begin, whole), whole if part == 0 else end, KEYS):
            local = places_of_keys(KEYS, DROP and ALIGNED)
            to = first + local
            column = to
            if (DROP and not ALIGNED) or part == 1:
                column = tl.load(key_index + to, mask=to < keys, other=0)
            k = rows_of(key, first, local, keys, KEY_ROW, WIDTH, BLOCK)
            scores = masked_scores(
                tl.dot(q, tl.trans(k), input_precision=PRECISION), mask, at[:, None], to[None, :], row[:, None],
                column[None, :], queries, keys, mask_row, mask_column, scale, CAUSAL, WINDOW, MASK, part == 0,
            )  # fmt: skip
            new = tl.maximum(top, tl.max(scores, axis=1))
            base = new
            if MASK > 0 or part == 1:
                base = tl.where(new == NOTHING, 0.0, new)
            weights = tl.exp2(scores - base[:, None])
            shrunk = tl.exp2(top - base)
            total = total * shrunk + tl.sum(weights, axis=1)
            if DROP:
                keep = kept_pairs(weights, number, first, column, drawn, salt, threshold, ROWS, KEYS, ALIGNED)
                weights = tl.where(keep, weights, 0.0)
            v = rows_of(value, first, local, keys, VALUE_ROW, VALUES, BLOCK_VALUES)
            result = tl.dot(weights.to(v.dtype), v, result * shrunk[:, None], input_precision=PRECISION)
            top = new
    sees = total > 0
    result = result * tl.where(sees, kept_scale / tl.where(sees, total, 1.0), 0.0)[:, None]
    out += (batch * queries * heads + head) * VALUES
    store_rows(out, result, first_row, place, queries, heads * VALUES, VALUES, BLOCK_VALUES)
    sums = tl.where(sees, (tl.where(sees, top, 0.0) + tl.log2(tl.where(sees, total, 1.0))) / LOG2_E, NOTHING)
    tl.store(logsumexp + matrix * queries + at, sums, mask=at < queries)


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(
    grad: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor, mask: tl.tensor, row_index: tl.tensor,
    key_index: tl.tensor, starts: tl.tensor, seed: tl.tensor, logsumexp: tl.tensor, delta: tl.tensor, out: tl.tensor,
    grad_query: tl.tensor, grad_mask: tl.tensor,
    query_batch: tl.tensor, query_head: tl.tensor, key_batch: tl.tensor, key_head: tl.tensor,
    value_batch: tl.tensor, value_head: tl.tensor,
    of_grad_batch: tl.tensor, of_grad_head: tl.tensor,
    heads: tl.tensor, groups: tl.tensor, inner: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    mask_outer: tl.tensor, mask_inner: tl.tensor, mask_head: tl.tensor, mask_row: tl.tensor, mask_column: tl.tensor,
    grad_outer: tl.tensor, grad_inner: tl.tensor, grad_head: tl.tensor, grad_row: tl.tensor, grad_column: tl.tensor,
    scale: tl.tensor, width: tl.tensor, salt: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    QUERY_ROW: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, OF_GRAD_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WITH_MASK: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of ROWS queries of a head, and, WITH_MASK, their part of that of the mask. Writes the products of the
    rows of `grad` and `out` into delta, for the pass by keys."""
    matrix = tl.program_id(1).to(tl.int64)
    batch, head = matrix // heads, matrix % heads
    group = head // (heads // groups)
    place = tl.arange(0, ROWS)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    at = first_row + place
    row = tl.load(row_index + at, mask=at < queries, other=0)
    begin, whole, end = seen_keys(row_index, key_index, at, queries, keys, KEYS, CAUSAL, WINDOW)
    query += batch * query_batch + head * query_head
    grad += batch * of_grad_batch + head * of_grad_head
    out += (batch * queries * heads + head) * VALUES
    q = rows_of(query, first_row, place, queries, QUERY_ROW, WIDTH, BLOCK)
    g = rows_of(grad, first_row, place, queries, OF_GRAD_ROW, VALUES, BLOCK_VALUES)
    o = rows_of(out, first_row, place, queries, OUT_ROW, VALUES, BLOCK_VALUES)
    less = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    tl.store(delta + matrix * queries + at, less, mask=at < queries)
    sums = tl.load(logsumexp + matrix * queries + at, mask=at < queries, other=NOTHING)
    sums = tl.where(sums == NOTHING, 0.0, sums * LOG2_E)
    key += batch * key_batch + group * key_head
    value += batch * value_batch + group * value_head
    mask += batch // inner * mask_outer + batch % inner * mask_inner + head * mask_head
    grad_mask += batch // inner * grad_outer + batch % inner * grad_inner + head * grad_head
    number = tl.load(starts + matrix) + row * width
    if ALIGNED:
        number += tl.load(key_index)
    drawn = tl.load(seed)
    of_query = tl.zeros((ROWS, BLOCK), tl.float32)
    for part in tl.static_range(1 if WINDOW > 0 else 0, 2):
        for first in tl.range(begin if part == 0 else tl.maximum(begin, whole), whole if part == 0 else end, KEYS):
            local = places_of_keys(KEYS, DROP and ALIGNED)
            to = first + local
            column = to
            if (DROP and not ALIGNED) or part == 1:
                column = tl.load(key_index + to, mask=to < keys, other=0)
            k = rows_of(key, first, local, keys, KEY_ROW, WIDTH, BLOCK)
            v = rows_of(value, first, local, keys, VALUE_ROW, VALUES, BLOCK_VALUES)
            scores = masked_scores(
                tl.dot(q, tl.trans(k), input_precision=PRECISION), mask, at[:, None], to[None, :], row[:, None],
                column[None, :], queries, keys, mask_row, mask_column, scale, CAUSAL, WINDOW, MASK, part == 0,
            )  # fmt: skip
            weights = tl.exp2(scores - sums[:, None])
            of_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            if DROP:
                keep = kept_pairs(weights, number, first, column, drawn, salt, threshold, ROWS, KEYS, ALIGNED)
                of_weights = tl.where(keep, of_weights * kept_scale, 0.0)
            of_scores = weights * (of_weights - less[:, None])
            if WITH_MASK:
                there = (at[:, None] < queries) & (to[None, :] < keys)
                target = grad_mask + at.to(tl.int64)[:, None] * grad_row + to.to(tl.int64)[None, :] * grad_column
                tl.atomic_add(target, of_scores, mask=there)
            of_query = tl.dot(of_scores.to(k.dtype), k, of_query, input_precision=PRECISION)
    grad_query += (batch * queries * heads + head) * WIDTH
    store_rows(grad_query, of_query * scale, first_row, place, queries, heads * WIDTH, WIDTH, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def keys_kernel(
    grad: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor, mask: tl.tensor, row_index: tl.tensor,
    key_index: tl.tensor, starts: tl.tensor, seed: tl.tensor, logsumexp: tl.tensor, delta: tl.tensor,
    grad_key: tl.tensor, grad_value: tl.tensor,
    query_batch: tl.tensor, query_head: tl.tensor, key_batch: tl.tensor, key_head: tl.tensor,
    value_batch: tl.tensor, value_head: tl.tensor,
    of_grad_batch: tl.tensor, of_grad_head: tl.tensor,
    heads: tl.tensor, groups: tl.tensor, inner: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    mask_outer: tl.tensor, mask_inner: tl.tensor, mask_head: tl.tensor, mask_row: tl.tensor, mask_column: tl.tensor,
    scale: tl.tensor, width: tl.tensor, salt: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    QUERY_ROW: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, OF_GRAD_ROW: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of KEYS keys and values of a group of heads: one program adds up all its heads and rows. Rows
    that are not there are zeros and add none."""
    own = tl.program_id(1).to(tl.int64)
    batch, group = own // groups, own % groups
    local = places_of_keys(KEYS, DROP and ALIGNED)
    own_first = tl.program_id(0) * KEYS
    to = own_first + local
    column = tl.load(key_index + to, mask=to < keys, other=0)
    begin, whole, end = seeing_rows(row_index, key_index, to, queries, keys, ROWS, CAUSAL, WINDOW)
    key += batch * key_batch + group * key_head
    value += batch * value_batch + group * value_head
    k = rows_of(key, own_first, local, keys, KEY_ROW, WIDTH, BLOCK)
    v = rows_of(value, own_first, local, keys, VALUE_ROW, VALUES, BLOCK_VALUES)
    drawn = tl.load(seed)
    offset = tl.load(key_index) if ALIGNED else 0
    of_keys = tl.zeros((KEYS, BLOCK), tl.float32)
    of_values = tl.zeros((KEYS, BLOCK_VALUES), tl.float32)
    for member in range(0, heads // groups):
        head = group * (heads // groups) + member
        matrix = batch * heads + head
        of_head = query + batch * query_batch + head * query_head
        grad_of_head = grad + batch * of_grad_batch + head * of_grad_head
        masked = mask + batch // inner * mask_outer + batch % inner * mask_inner + head * mask_head
        start = tl.load(starts + matrix) + offset
        for part in tl.static_range(0, 1 if WINDOW > 0 else 2):
            for first in tl.range(begin if part == 0 else whole, tl.minimum(whole, end) if part == 0 else end, ROWS):
                place = tl.arange(0, ROWS)
                at = first + place
                row = at
                if DROP or part == 0:
                    row = tl.load(row_index + at, mask=at < queries, other=0)
                q = rows_of(of_head, first, place, queries, QUERY_ROW, WIDTH, BLOCK)
                g = rows_of(grad_of_head, first, place, queries, OF_GRAD_ROW, VALUES, BLOCK_VALUES)
                sums = tl.load(logsumexp + matrix * queries + at, mask=at < queries, other=NOTHING)
                sums = tl.where(sums == NOTHING, 0.0, sums * LOG2_E)
                scores = masked_scores(
                    tl.dot(q, tl.trans(k), input_precision=PRECISION), masked, at[:, None], to[None, :], row[:, None],
                    column[None, :], queries, keys, mask_row, mask_column, scale, CAUSAL, WINDOW, MASK, part == 1,
                )  # fmt: skip
                weights = tl.exp2(scores - sums[:, None])
                of_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
                kept = weights
                if DROP:
                    number = start + row * width
                    keep = kept_pairs(weights, number, own_first, column, drawn, salt, threshold, ROWS, KEYS, ALIGNED)
                    kept = tl.where(keep, weights, 0.0)
                    of_weights = tl.where(keep, of_weights * kept_scale, 0.0)
                of_values = tl.dot(tl.trans(kept.to(g.dtype)), g, of_values, input_precision=PRECISION)
                less = tl.load(delta + matrix * queries + at, mask=at < queries, other=0.0)
                of_scores = weights * (of_weights - less[:, None])
                of_keys = tl.dot(tl.trans(of_scores.to(q.dtype)), q, of_keys, input_precision=PRECISION)
    grad_key += (batch * keys * groups + group) * WIDTH
    grad_value += (batch * keys * groups + group) * VALUES
    store_rows(grad_key, of_keys * scale, own_first, local, keys, groups * WIDTH, WIDTH, BLOCK)
    store_rows(grad_value, of_values * kept_scale, own_first, local, keys, groups * VALUES, VALUES, BLOCK_VALUES)


Tile = tuple[int, int, int, int, int | None]
"""Rows, keys, warps, stages, most registers of a thread (None: as many as the compiler takes)."""
TILES: tuple[tuple[int, int, tuple[Tile, Tile, Tile]], ...] = (
    (64, 2, ((64, 64, 4, 3, 168), (64, 32, 4, 3, None), (64, 64, 4, 1, None))),
    (128, 2, ((64, 32, 4, 2, None), (64, 32, 4, 2, None), (32, 32, 8, 1, None))),
    (256, 2, ((32, 32, 8, 1, None), (32, 32, 8, 1, None), (32, 32, 8, 1, None))),
    (64, 4, ((32, 64, 8, 2, None), (16, 32, 8, 2, None), (16, 32, 8, 2, None))),
    (128, 4, ((16, 32, 8, 2, None), (16, 32, 8, 2, None), (16, 32, 8, 2, None))),
    (256, 4, ((16, 16, 8, 2, None), (16, 16, 8, 2, None), (16, 16, 8, 2, None))),
)
"""(largest head, bytes of an element, tiles of forward, of the pass by rows and of that by keys).

Those of heads of 64 in bf16 are the fastest of 15, 11 and 14 on an H100 (torch 2.11, triton 3.6; 16x12x1024x64, causal,
dropout, rows of a head side by side): 233 us (268 without a limit of registers), 236 us, 329 us. The others are chosen
by registers alone."""
MASKED: tuple[int, int, tuple[Tile, Tile, Tile]] = (
    64, 2, ((32, 64, 8, 2, None), (32, 64, 8, 2, None), (32, 64, 8, 2, None))
)  # fmt: skip
"""The same where a mask, whose places and gradient take registers, leaves no room for larger ones."""


def tiles_of(query: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tile, Tile, Tile]:
    """Tiles of forward, of the pass by rows and of that by keys for such heads."""
    width, element_bytes = max(query.shape[-1], value.shape[-1]), query.element_size()
    table = TILES if mask is None else (MASKED, *TILES)
    return next(tiles for largest, size, tiles in table if width <= largest and size == element_bytes)


def indexed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, inner: int, is_causal: bool, scale: float,
    rows: Tensor, keys: Tensor, dropout_p: float, seed: Tensor | None, salt: int, starts: Tensor, width: int,
    aligned: bool, window: int | None = None, tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `indexed_attention_reference`."""
    query, key, value = (_dense(x) for x in (query, key, value))
    out = empty_by_sequence(query, (*query.shape[:-1], value.shape[-1]))
    logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
    tile = tile or tiles_of(query, value, mask)[0]
    call = _arguments(query, key, value, mask, inner, scale, dropout_p, salt, width)
    forward_kernel[triton.cdiv(query.shape[2], tile[0]), query.shape[0] * query.shape[1]](
        query, key, value, _or(mask, query), rows, keys, starts, _or(seed, rows), out, logsumexp,
        *_by_head(query, key, value), *call,
        **_by_row(query, key, value), **_constants(query, value, mask, is_causal, window, dropout_p, aligned, tile),
    )  # fmt: skip
    return out, logsumexp


def indexed_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, logsumexp: Tensor,
    inner: int, is_causal: bool, scale: float, rows: Tensor, keys: Tensor, dropout_p: float, seed: Tensor | None,
    salt: int, starts: Tensor, width: int, aligned: bool, with_mask: bool, window: int | None = None,
    tiles: tuple[Tile, Tile] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `indexed_attention_backward_reference`."""
    grad, query, key, value = (_dense(x) for x in (grad, query, key, value))
    out = store_by_sequence(out)
    logsumexp = logsumexp.contiguous()
    delta = torch.empty_like(logsumexp)
    grads = [empty_by_sequence(x, x.shape) for x in (query, key, value)]
    of_mask = query.new_zeros(mask.shape if with_mask and mask is not None else (0,), dtype=torch.float32)
    by_rows, by_keys = tiles or tiles_of(query, value, mask)[1:]
    call = _arguments(query, key, value, mask, inner, scale, dropout_p, salt, width)
    options = (query, value, mask, is_causal, window, dropout_p, aligned)
    tensors = (grad, query, key, value, _or(mask, query), rows, keys, starts, _or(seed, rows), logsumexp, delta)
    lie = _by_head(query, key, value, grad)
    by_row = {**_by_row(query, key, value), "OF_GRAD_ROW": grad.stride(2)}
    batch, heads, queries = query.shape[:3]
    strides = _strides(of_mask) if with_mask else (0,) * 5
    rows_kernel[triton.cdiv(queries, by_rows[0]), batch * heads](
        *tensors, out, grads[0], of_mask, *lie, *call[:10], *strides, *call[10:], **_constants(*options, by_rows),
        **by_row, OUT_ROW=out.stride(2), WITH_MASK=with_mask,
    )  # fmt: skip
    keys_kernel[triton.cdiv(key.shape[2], by_keys[1]), batch * key.shape[1]](
        *tensors, grads[1], grads[2], *lie, *call, **by_row, **_constants(*options, by_keys)
    )
    return grads[0], grads[1], grads[2], of_mask.to(mask.dtype if with_mask and mask is not None else query.dtype)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that no program follows, where there is no tensor."""
    return other if x is None else x.view(torch.int8) if x.dtype == torch.bool else x


def _dense(x: Tensor) -> Tensor:
    """With neighbours along its last dim; other strides a kernel takes as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_head(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of batch and heads of each."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def _by_row(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    """Those of rows, constants of a program: addresses within a tile are then constants beside one pointer."""
    return {"QUERY_ROW": query.stride(2), "KEY_ROW": key.stride(2), "VALUE_ROW": value.stride(2)}


def _strides(mask: Tensor | None) -> tuple[int, ...]:
    """Of the five dims (outer, inner, heads, rows, keys); 0 along those over which the mask broadcasts."""
    if mask is None:
        return (0,) * 5
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))


def _arguments(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, inner: int, scale: float,
               dropout_p: float, salt: int, width: int) -> tuple[float, ...]:  # fmt: skip
    """Where all is dropped, the threshold keeps a word in 2**32, and its scale is 0."""
    kept_scale = 0.0 if dropout_p >= 1.0 else 1.0 / (1.0 - dropout_p)
    sizes = (query.shape[1], key.shape[1], inner, query.shape[2], key.shape[2])
    return (*sizes, *_strides(mask), scale, width, salt, min(drop_threshold(dropout_p), WORD), kept_scale)


def _constants(query: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, window: int | None,
               dropout_p: float, aligned: bool, tile: Tile) -> dict[str, object]:  # fmt: skip
    kind = 0 if mask is None else 2 if mask.dtype == torch.bool else 1
    return {
        "WIDTH": query.shape[-1], "VALUES": value.shape[-1], "ROWS": tile[0], "KEYS": tile[1],
        "BLOCK": max(LEAST_DOT, triton.next_power_of_2(query.shape[-1])),
        "BLOCK_VALUES": max(LEAST_DOT, triton.next_power_of_2(value.shape[-1])),
        "CAUSAL": is_causal, "WINDOW": window or 0, "MASK": kind, "DROP": dropout_p > 0.0, "ALIGNED": aligned,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32", "num_warps": tile[2], "num_stages": tile[3],
        **({} if tile[4] is None else {"maxnreg": tile[4]}),
    }  # fmt: skip

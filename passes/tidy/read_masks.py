"""Masks of attention that constants alone decide become its causal flag and its window.

    attention(q, k, v, key <= row, ..., False)             -->   attention(q, k, v, None, ..., True)
    attention(q, k, v, (key <= row) & (key > row - 8))     -->   attention(q, k, v, None, ..., True, window=8)
    attention(q, k, v, (row - key).abs() <= 8)             -->   attention(q, k, v, None, ..., False, window=9)
    attention(q, k, v, (key <= row) & padding)             -->   attention(q, k, v, padding, ..., True)

A mask stays where it is anything else. What it holds is read exactly (`index_values`). In an added mask 0 lets a pair
through, and -inf or the least number of float32 or bfloat16 hides it: the weight of such a pair is exactly 0, as every
row sees its own key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.ops.attention_operator import attention, attention_backward
from autopar.passes.arguments import arguments
from autopar.passes.tidy.index_values import IndexValues
from autopar.passes.tidy.insert import insert_before
from autopar.rules.call import argument_slot

aten = torch.ops.aten
HIDES = torch.finfo(torch.bfloat16).min
"""From here on a number that is added to a score hides the pair; that of float32 is less."""
CONJUNCTIONS = (aten.bitwise_and.Tensor, aten.logical_and.default)
ATTENTION = (attention._opoverload, attention_backward._opoverload)
Read: TypeAlias = tuple[bool, int | None]
"""is_causal, window."""


def read_masks(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Rewrite attention and its backward alike."""
    rests: dict[tuple[Node, ...], Node] = {}
    for node in list(graph_module.graph.nodes):
        if node.target in ATTENTION:
            _read_mask(node, rests)
    return graph_module


def _read_mask(node: Node, rests: dict[tuple[Node, ...], Node]) -> None:
    """rests: what is left of masks, by the conditions that it joins."""
    places = {name: argument_slot(node.target, name)[0] for name in ("query", "key", "mask", "is_causal", "window")}
    given = arguments(node)
    mask = given[places["mask"]]
    if mask is None or given[places["is_causal"]] or len(given) > places["window"]:
        return
    queries, keys = (given[places[name]].meta["val"].shape for name in ("query", "key"))
    if queries[-2] != keys[-2]:
        return
    values = IndexValues((*queries[:-1], keys[-2]))
    conditions = list(_conditions(mask, node))
    found = [(condition, _seen(values.of(condition))) for condition in conditions]
    known = [seen for _, seen in found if seen is not None]
    read = _band(known, keys[-2]) if known else None
    if read is None:
        return
    rest = _joined(tuple(condition for condition, seen in found if seen is None), node, rests)
    changed = list(given)
    changed[places["mask"]], changed[places["is_causal"]] = rest, read[0]
    node.args = (*changed, *(() if read[1] is None else (read[1],)))


def _conditions(mask: Node, point: Node) -> Iterator[Node]:
    """The bool tensors that a mask is the conjunction of; the mask itself where it is none. What a view of a
    conjunction makes of them is put in front of `point`."""
    target, given = mask.target, arguments(mask)
    if mask.meta["val"].dtype != torch.bool or target not in (*CONJUNCTIONS, aten.expand.default, aten.view.default):
        yield mask
    elif target in CONJUNCTIONS:
        for operand in given:
            yield from _conditions(operand, point)
    elif target is aten.expand.default:
        yield from _conditions(given[0], point)
    else:
        places = _inserted(given[0].meta["val"].shape, mask.meta["val"].shape)
        parts = [] if places is None else list(_conditions(given[0], point))
        yield from [mask] if len(parts) < 2 else (_viewed(part, places or [], mask, point) for part in parts)


def _inserted(source: Sequence[int], result: Sequence[int]) -> list[int] | None:
    """The dims of size 1 that a view adds; None where it does more."""
    left, places = list(source), list[int]()
    for dim, size in enumerate(result):
        if left and left[0] == size:
            left.pop(0)
        elif size == 1:
            places.append(dim)
        else:
            return None
    return None if left else places


def _viewed(part: Node, places: Sequence[int], mask: Node, point: Node) -> Node:
    """A condition with these dims of size 1, as it broadcasts to a mask that has them."""
    shape = list(part.meta["val"].shape)
    shape[:0] = [1] * (mask.meta["val"].dim() - len(places) - len(shape))
    for dim in places:
        shape.insert(dim, 1)
    return insert_before(point, aten.view.default, (part, shape), like=point)


def _seen(values: Tensor | None) -> Tensor | None:
    """bool: the pairs that a mask lets through; None for one that does more."""
    if values is None or values.dtype == torch.bool:
        return values
    if not values.dtype.is_floating_point:
        return None
    seen = values == 0
    return seen if bool((seen | (values <= HIDES)).all()) else None


def _band(known: list[Tensor], length: int) -> Read | None:
    """What lets the same pairs through as all of these do, each by i - j = 1 - length .. length - 1."""
    distance = torch.arange(1 - length, length)
    seen = torch.ones_like(distance, dtype=torch.bool)
    for each in known:
        seen = seen & each
    if not bool(seen[length - 1]) or length < 2:
        return None
    first, last = (int(end) for end in distance[seen].aminmax())
    if first not in (0, -last) or not bool((seen == ((distance >= first) & (distance <= last))).all()):
        return None
    window = None if last == length - 1 else last + 1
    return None if window == 1 else (first == 0, window)


def _joined(conditions: tuple[Node, ...], point: Node, rests: dict[tuple[Node, ...], Node]) -> Node | None:
    """The conjunction of conditions, made once, in front of `point`."""
    if len(conditions) < 2:
        return conditions[0] if conditions else None
    if conditions not in rests:
        first = _joined(conditions[:-1], point, rests)
        rests[conditions] = insert_before(point, aten.bitwise_and.Tensor, (first, conditions[-1]), like=point)
    return rests[conditions]

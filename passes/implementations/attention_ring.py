"""Ring attention: every rank holds a block of queries, keys and values; blocks of keys and values go around.

    step 0   own queries x own keys         meanwhile own keys go to the next rank, and those of the one before arrive
    step 1   own queries x these keys       meanwhile they go on ...
    backward the same once more; sums for the gradients of the keys that arrive follow them, one step behind, and one
             hop further at the end, to the rank that holds these keys

Blocks are joined by their logsumexp. Of a causal attention, and of one with a window, a rank computes what its rows
see: other keys are passed on only, a block of which all rows see all keys is whole. Where no rank sees keys that come
from further away, hops end, and sums for gradients go straight home: a causal window asks the ranks in front only; one
on both sides, or in zigzag order, those behind, too, in a second round of hops the other way. Who holds which rows
follows from the layout, so that uneven blocks and any order of blocks need no special case; dropout draws by global
index. Source: Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.graphs.collective_nodes import HOP
from autopar.layouts.placement import Layout, local_runs, local_shape
from autopar.ops.attention_blocks import Band, Run, ring_offsets
from autopar.ops.random_index import Runs
from autopar.ops.ring_attention import attention_block, attention_block_backward, message, rounded
from autopar.passes.implementations.local_context import LocalContext

_aten = torch.ops.aten
Shape = tuple[int, ...]


def _ring_attention(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    ring = _Ring.of(context, args, kwargs, first=0)
    wide = _wide(ring.dtype)
    shape, rows = context.output_shape(0), context.output_shape(1)
    seen = sum(ring.sees(step) is not None for step in range(len(ring.offsets)))
    found: tuple[fx.Node, fx.Node] | None = None
    joined: fx.Node | None = None
    unread = list[fx.Node]()
    for step, key, value in ring.steps():
        if not (sight := ring.sees(step)):
            unread += [key] if ring.ends(step) else []
            continue
        made = ring.call(attention_block, (), key, value, (), step, sight)
        joined = context.describe(made, (shape, rows), (ring.dtype, wide))
        other = _items(context, joined, 2)
        if found is not None:
            joined = context.call(torch.ops.autopar.merge_blocks.default, *found, *other)
            joined = context.describe(joined, (shape, rows), (found[0].meta["dtype"], wide))
            other = _items(context, joined, 2)
        elif seen > 2 and ring.dtype != wide:  # summed in the wider dtype, rounded once
            other[0] = context.describe(context.call(_aten._to_copy.default, other[0], dtype=wide), shape, wide)
        found = other[0], other[1]
    assert joined is not None, "a rank sees its own block"
    assert found is not None, "so does it join it"
    if unread or (seen > 2 and ring.dtype != wide):
        return context.call(rounded, *found, dtypes=(ring.dtype, wide), unread=tuple(unread))
    return joined


def _ring_attention_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    ring = _Ring.of(context, args, kwargs, first=1)
    wide = _wide(ring.dtype)
    grad, (out, logsumexp) = args[0], (context.argument(args, kwargs, name) for name in ("out", "logsumexp"))
    shape = context.output_shape(0)
    of_query: fx.Node | None = None
    on_its_way: fx.Node | None = None
    own: fx.Node | None
    unread, at_home = list[fx.Node](), list[fx.Node]()
    for step, key, value in ring.steps():
        shapes = ring.shapes(step)
        length = sum(map(math.prod, shapes))
        own = None
        if sight := ring.sees(step):
            made = ring.call(attention_block_backward, (grad,), key, value, (out, logsumexp), step, sight)
            made = context.describe(made, (shape, *shapes), (ring.dtype,) * 3)
            part, *of_keys = _items(context, made, 3)
            own = context.describe(context.call(message, *of_keys, wide), (length,), wide)
            of_query = _added(context, of_query, part, wide)
        elif ring.ends(step):
            unread.append(key)
        if on_its_way is not None:
            arrived = context.waited(on_its_way)
            own = arrived if own is None else _added(context, arrived, own, wide)
        if own is None:  # the first one of a round that sees nothing: others send what it passes on
            own = context.describe(context.call(_aten.new_zeros.default, key, [length], dtype=wide), (length,), wide)
        if ring.ends(step):
            at_home.append(ring.send_home(own, step))
            on_its_way = None
        else:
            on_its_way = ring.pass_on(own, step)
    assert of_query is not None, "a rank sees its own block"
    sums: fx.Node | None = None
    for sent in at_home:
        sums = _added(context, sums, context.waited(sent), wide)
    assert sums is not None, "a ring has a round"
    of_keys = list(ring.read(sums, 0))
    return context.call(rounded, of_query, *of_keys, dtypes=(ring.dtype,) * 3, unread=tuple(unread))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """The ring of one rank. first: place of the query among the tensor operands; holders: coordinates of its ranks, in
    their order; position: this rank among them; rows: per dim of the scores before the keys, the runs of global indices
    that this rank has; offsets: how far in front of a rank stand those whose keys are here at a step."""

    context: LocalContext
    first: int
    axes: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    position: int
    query: fx.Node
    own: tuple[fx.Node, fx.Node]
    mask: fx.Node | None
    layouts: tuple[Layout, Layout]
    rows: Runs
    band: Band
    offsets: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any], first: int) -> _Ring:
        axes = context.axes_of(frozenset({"s"}))
        holders = []
        for at in itertools.product(*(range(context.mesh.shape[axis]) for axis in axes)):
            coordinate = list(context.coordinate)
            for axis, place in zip(axes, at, strict=True):
                coordinate[axis] = place
            holders.append(tuple(coordinate))
        query, key, value, mask = (context.argument(args, kwargs, n) for n in ("query", "key", "value", "mask"))
        shape, layout = context.global_argument("query").meta["val"].shape, context.plan.inputs[first]
        band = Band.of(context.global_argument("is_causal"), context.global_argument("window"))
        runs = [local_runs(shape[-2], layout, len(shape) - 2, context.mesh, holder) for holder in holders]
        return cls(
            context=context,
            first=first,
            axes=axes,
            holders=tuple(holders),
            position=holders.index(context.coordinate),
            query=query,
            own=(key, value),
            mask=mask,
            layouts=(context.plan.inputs[first + 1], context.plan.inputs[first + 2]),
            rows=tuple(
                local_runs(size, layout, dim, context.mesh, context.coordinate) for dim, size in enumerate(shape[:-1])
            ),
            band=band,
            offsets=ring_offsets(tuple(runs), band),
            dtype=context.global_argument("query").meta["val"].dtype,
        )

    @property
    def ranks(self) -> int:
        return len(self.holders)

    def holder(self, step: int) -> tuple[int, ...]:
        """Coordinate of the rank whose keys are here at a step."""
        return self.holders[(self.position - self.offsets[step]) % self.ranks]

    def ends(self, step: int) -> bool:
        """Whether the keys of a step go no further."""
        return step + 1 == len(self.offsets) or self.offsets[step + 1] == -1

    def shapes(self, step: int) -> tuple[Shape, Shape]:
        """Of the keys and values that are here at a step."""
        found = [
            local_shape(self._whole(name), layout, self.context.mesh, self.holder(step))
            for name, layout in zip(("key", "value"), self.layouts, strict=True)
        ]
        return found[0], found[1]

    def keys(self, step: int) -> tuple[Run, ...]:
        """Runs of global indices of the keys that are here at a step."""
        shape = self._whole("key")
        return local_runs(shape[-2], self.layouts[0], len(shape) - 2, self.context.mesh, self.holder(step))

    def sees(self, step: int) -> str | None:
        """Whether rows see "all" of the keys of a step, "some", or none of them."""
        return self.band.sight(self.rows[-1], self.keys(step))

    def steps(self) -> Any:
        """(step, key, value), the way to the next ones started in front of what is made of them."""
        context, (key, value) = self.context, self.own
        buffer: fx.Node | None = None
        for step in range(len(self.offsets)):
            started = None
            if step + 1 < len(self.offsets):
                if buffer is None or self.ends(step):  # a round begins with the own ones
                    made = context.call(message, *self.own, self.dtype, *([] if buffer is None else [buffer]))
                    own = context.describe(made, (sum(map(math.prod, self.shapes(0))),), self.dtype)
                    started = self._shifted(own, 0, step + 1)
                else:
                    started = self.pass_on(buffer, step)
            yield step, key, value
            if started is not None:
                buffer = context.waited(started)
                key, value = self.read(buffer, step + 1)

    def read(self, buffer: fx.Node, step: int) -> tuple[fx.Node, fx.Node]:
        """The two tensors of a message about the keys of a step; views."""
        context, dtype, start, found = self.context, buffer.meta["dtype"], 0, list[fx.Node]()
        for shape in self.shapes(step):
            *batch, heads, length, size = shape
            by_sequence = (*batch, length, heads, size)
            end = start + math.prod(shape)
            node = context.describe(context.call(_aten.slice.Tensor, buffer, 0, start, end), (end - start,), dtype)
            node = context.describe(context.call(_aten.view.default, node, by_sequence), by_sequence, dtype)
            order = (*range(len(batch)), len(batch) + 1, len(batch), len(batch) + 2)
            found.append(context.describe(context.call(_aten.permute.default, node, order), shape, dtype))
            start = end
        return found[0], found[1]

    def pass_on(self, buffer: fx.Node, step: int) -> fx.Node:
        """Start the way of what belongs to the keys of a step to the next rank."""
        return self._shifted(buffer, step, step + 1)

    def send_home(self, buffer: fx.Node, step: int) -> fx.Node:
        """Start the way of what belongs to the keys of a step to the rank that holds them."""
        return self._shifted(buffer, step, 0)

    def _shifted(self, buffer: fx.Node, step: int, to: int) -> fx.Node:
        """Start the way of what belongs to the keys of a step to where it does at step `to`."""
        sent, received = (sum(map(math.prod, self.shapes(at))) for at in (step, to))
        by = self.offsets[to] - self.offsets[step]
        started = self.context.shifted(buffer, sent, received, self.position, by, self.axes)
        started.meta[HOP] = True
        return started

    def call(
        self, function: Callable[..., Any], before: Sequence[fx.Node], key: fx.Node, value: fx.Node,
        behind: Sequence[fx.Node], step: int, sight: str,
    ) -> fx.Node:  # fmt: skip
        """Attention of the own queries over the keys of a step."""
        given = self.context.global_argument
        dropout, scale, salt = (given(name) for name in ("dropout_p", "scale", "salt"))
        seed = self.context.seed if dropout > 0.0 else None
        whole = (*self._whole("query")[:-1], self._whole("key")[-2])
        runs = (*self.rows, self.keys(step))
        operands = (*before, self.query, key, value, self._mask_of(step), *behind)
        hides = sight == "some"
        causal, window = given("is_causal") and hides, given("window")
        options = {"window": window} if hides and window is not None else {}
        return self.context.call(function, *operands, dropout, causal, scale, salt, seed, runs, whole, **options)

    def _mask_of(self, step: int) -> fx.Node | None:
        """The columns of the mask of the keys of a step."""
        if self.mask is None:
            return None
        whole = self.context.global_argument("mask").meta["val"]
        shape, dtype = self.context.input_shape(self.first + 3, tuple(whole.shape)), whole.dtype
        if shape[-1] == 1:
            return self.mask
        parts = []
        for start, length in self.keys(step):
            part = self.context.call(_aten.slice.Tensor, self.mask, -1, start, start + length)
            parts.append(self.context.describe(part, (*shape[:-1], length), dtype))
        if len(parts) == 1:
            return parts[0]
        length = sum(length for _, length in self.keys(step))
        return self.context.describe(self.context.call(_aten.cat.default, parts, -1), (*shape[:-1], length), dtype)

    def _whole(self, name: str) -> Shape:
        return tuple(self.context.global_argument(name).meta["val"].shape)


def _added(context: LocalContext, total: fx.Node | None, part: fx.Node, wide: torch.dtype) -> fx.Node:
    """The total in the wider dtype."""
    shape = part.meta["local_shape"]
    if total is None:
        if part.meta["dtype"] == wide:
            return part
        return context.describe(context.call(_aten._to_copy.default, part, dtype=wide), shape, wide)
    return context.describe(context.call(_aten.add.Tensor, total, part), shape, wide)


def _items(context: LocalContext, made: fx.Node, count: int) -> list[fx.Node]:
    shapes, dtypes = made.meta["local_shape"], made.meta["dtype"]
    return [
        context.describe(context.call(operator.getitem, made, index), shapes[index], dtypes[index])
        for index in range(count)
    ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


IMPLEMENTATIONS = {"ring_attention": _ring_attention, "ring_attention_backward": _ring_attention_backward}

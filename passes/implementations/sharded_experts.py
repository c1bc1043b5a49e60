"""Products with a block of the experts: `autopar.ops.experts` with the first expert of this rank's block.

Rows of other experts are zero (masked), or every rank has rows of its own, which `sort_by_expert` sends to the rank of
their expert and back (dispatched).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from torch import fx

from autopar.graphs.expert_capacity import capacity_of, places_per_expert
from autopar.graphs.expert_loads import OWN_ROWS, load_of, order_of_experts, replicated_of
from autopar.graphs.rows_per_rank import BusiestRows, busiest_part, busiest_rows
from autopar.layouts.placement import Layout, Replicate, Shard, local_shape, local_start
from autopar.ops import experts
from autopar.ops.dispatch import Dispatch, Hop
from autopar.passes.implementations.local_context import LocalContext
from autopar.plans.expert_hops import hops_of
from autopar.rules.rule import PAIR


def _expert_linear(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    num_experts = int(context.global_argument("weight").meta["val"].shape[0])
    start = context.input_start(1, 0, num_experts)
    return _of_some(context, num_experts, context.call(experts.block_expert_linear, *args, start, **kwargs))


def _expert_outer(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    num_experts, start = context.output_shape()[0], context.output_start(0, 0)
    call = context.call(experts.block_expert_outer, *args[:3], num_experts, args[4], start)
    return _of_some(context, context.node.meta["val"].shape[0], call)


def _of_some(context: LocalContext, num_experts: int, call: fx.Node) -> fx.Node:
    """The call, which says what part of its rows the busiest rank has an expert for: the others are no work."""
    axes = context.axes_of(frozenset(name for name in context.plan.axes if name and "e" in name.split(PAIR)))
    ranks = math.prod(context.mesh.shape[axis] for axis in axes)
    rows = _ids_shape(context)[0]
    call.meta[OWN_ROWS] = busiest_part(load_of(context.node, num_experts), ranks, rows)
    return call


def _dispatched_linear(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    num_experts = int(context.global_argument("weight").meta["val"].shape[0])
    there = _dispatch(context, num_experts, context.plan.inputs[1])
    return context.call(experts.dispatched_expert_linear, *args, there, **kwargs)


def _dispatched_outer(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    there = _dispatch(context, context.global_output().shape[0], context.plan.outputs[0])
    return context.call(experts.dispatched_expert_outer, *args[:3], context.output_shape()[0], args[4], there)


def _dispatch(context: LocalContext, num_experts: int, layout: Layout) -> Dispatch:
    """Where the experts are, of a rank whose rows travel along the axes that split rows and experts alike."""
    axes = context.axes_of(frozenset(name for name in context.plan.axes if name is not None and PAIR in name))
    group = tuple(context.coordinate[axis] for axis in axes)
    sizes = [context.mesh.shape[axis] for axis in axes]
    held, rows = [], list[int]()
    for place in itertools.product(*map(range, sizes)):
        coordinate = list(context.coordinate)
        for axis, at in zip(axes, place, strict=True):
            coordinate[axis] = at
        (number,) = local_shape((num_experts,), _of_dim(layout), context.mesh, coordinate)
        held.append((local_start(num_experts, _of_dim(layout), 0, context.mesh, coordinate), number))
        rows += local_shape(_ids_shape(context), context.plan.inputs[-1], context.mesh, coordinate)
    names = [context.mesh.axis_names[axis] for axis in axes]
    start, block = held[0]
    count = sum(number for _, number in held)
    shares = load_of(context.node, num_experts)[start : start + count]
    replicated = tuple(one for one in replicated_of(context.node) if start <= one < start + count)
    most, ranks, capacity = max(rows), math.prod(sizes), capacity_of(context.node)
    own = [one - start for one in replicated]
    return Dispatch(
        start=start,
        experts=count,
        block=block,
        ranks=ranks,
        position=_position(group, sizes),
        group="+".join(names),
        hops=tuple(_hops(names, sizes, group, block, partial(_busiest, shares, own, most), capacity is None)),
        replicated=replicated,
        shares=shares,
        room=None if capacity is None else places_per_expert(most, num_experts, capacity),
        fewest=min(rows),
        order=order_of_experts(context.node) if count == num_experts else (),
    )


def _hops(
    names: Sequence[str],
    sizes: Sequence[int],
    places: Sequence[int],
    block: int,
    busiest: Callable[[int], BusiestRows],
    may_be_two: bool,
) -> Iterator[Hop]:
    """Over all axes at once, or over those in front of the inner one of experts and then over the others. busiest: by
    the number of ranks among which experts are dealt out."""
    every = range(len(names))
    for hop in hops_of(every, names) if may_be_two else [tuple(every)]:
        first, last = hop[0], hop[-1] + 1
        parts, behind, rows = math.prod(sizes[:last]), math.prod(sizes[last:]), busiest(math.prod(sizes[:last]))
        yield Hop(
            group="+".join(names[first:last]),
            ranks=math.prod(sizes[first:last]),
            position=_position(places[first:last], sizes[first:last]),
            block=block * behind,
            busiest=parts * rows.computed,
            travels=rows.received / max(rows.computed, 1e-30),
            fullest=parts * rows.fullest,
        )


def _busiest(shares: Sequence[float], replicated: Collection[int], most: int, ranks: int) -> BusiestRows:
    """`busiest_rows` of so many ranks, each of which has as many rows."""
    return busiest_rows(shares, replicated, ranks, ranks * most)


def _position(places: Sequence[int], sizes: Sequence[int]) -> int:
    """Of a rank among those of axes of these sizes."""
    return sum(at * math.prod(sizes[i + 1 :]) for i, at in enumerate(places))


def _ids_shape(context: LocalContext) -> tuple[int, ...]:
    return tuple(context.global_argument("expert_ids").meta["val"].shape)


def _of_dim(layout: Layout) -> Layout:
    """Of a tensor of experts, the layout of its dim 0 alone."""
    return tuple(p if isinstance(p, Shard) and p.dim == 0 else Replicate() for p in layout)


IMPLEMENTATIONS = {
    "dispatched_experts": _dispatched_linear,
    "dispatched_experts_outer": _dispatched_outer,
    "masked_experts": _expert_linear,
    "masked_experts_outer": _expert_outer,
}

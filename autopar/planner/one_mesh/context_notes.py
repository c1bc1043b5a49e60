"""Notes of context parallelism: what an axis cp was meant to split and cannot, what runs instead, and the next step.

the sequence of 6 does not divide by cp=4 and has fewer than 16 tokens: attention runs replicated over it; pad ...
cp="ring": attention of 6 queries over 12 keys runs without a ring (a ring needs as many keys as queries) ...
cp="ulysses": 2 key heads do not divide by cp=4: attention splits the query sequence over it, keys and values whole ...
the sequence of 36 does not divide by 2 x cp=4: zigzag order needs that; in plain order the last rank ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.graphs.operator_names import is_causal, window_of
from autopar.layouts.placement import Mesh
from autopar.planner.problem.build import Built
from autopar.planner.problem.strategies import MINIMUM_UNEVEN_BLOCKS, Strategies
from autopar.plans.plan_value import RING
from autopar.request.axis_ways import ContextParallelism
from autopar.request.mesh_axes import CONTEXT_AXES

Assignment = NDArray[np.int64]

INSTEAD = {
    "g": "the queries of every key head over it, and every rank has all keys and values",
    "s": "the query sequence over it, and every rank gathers all keys and values",
}
"""What attention splits where Ulysses cannot split heads of keys, in words."""


NOTHING_SPLIT = (
    "nothing: it divides no part of the sequence that all operators keep (of a scan in chunks, their number), or costs "
    "more than it saves; ask for a size that divides it"
)


def context_notes(
    built: Built, assignment: Assignment, mesh: Mesh, cp: ContextParallelism | None
) -> Iterator[str]:
    """Of every axis of context parallelism, each once; none where a mesh has none. cp: the way that was asked for."""
    axes = [axis for axis, name in enumerate(mesh.axis_names) if name in CONTEXT_AXES and mesh.shape[axis] > 1]
    attentions = [node for node in built.rules if str(node.target).startswith("autopar.attention.")]
    if not axes:
        return
    if not attentions:
        splits = any(picked_names(built, assignment, node)[axes[0]] is not None for node in built.operators)
        yield (
            f"{mesh.axis_names[axes[0]]}={mesh.shape[axes[0]]}: the program calls no fused attention "
            "(torch.nn.functional.scaled_dot_product_attention), so it splits "
            + ("the sequence of other operators only" if splits else NOTHING_SPLIT)
        )
        return
    found: dict[str, None] = {}
    for node in attentions:
        sizes, picked = built.rules[node].sizes, picked_names(built, assignment, node)
        length = sizes.get("s", 1)
        for axis in axes:
            said = f"{mesh.axis_names[axis]}={mesh.shape[axis]}"
            found |= dict.fromkeys(_whole_sequence(length, mesh.shape[axis], said, picked[axis]))
            if cp == "ulysses":
                found |= dict.fromkeys(_heads(sizes.get("h", 1), mesh.shape[axis], said, picked[axis]))
        strategies, label = _picked(built, assignment, node)
        if cp == "ring" and strategies.implementation(label) != RING:
            found |= dict.fromkeys(_no_ring(length, sizes.get("t", length)))
        rings = [axis for axis in axes if picked[axis] == "s"]
        if rings and is_causal(node) and window_of(node) is None:
            found |= dict.fromkeys(_order(length, [mesh.shape[axis] for axis in rings], mesh, rings))
    yield from found


def picked_names(built: Built, assignment: Assignment, node: fx.Node) -> tuple[str | None, ...]:
    """The names that an operator splits, per axis of the mesh; None where it is replicated."""
    strategies, label = _picked(built, assignment, node)
    return tuple(strategies.axes[label])


def _picked(built: Built, assignment: Assignment, node: fx.Node) -> tuple[Strategies, int]:
    """The strategies of an operator, and which of them was taken."""
    index = built.operators[node]
    strategies = built.variables[index].strategies
    assert strategies is not None
    return strategies, int(assignment[index])


def _no_ring(queries: int, keys: int) -> Iterator[str]:
    """Of an attention without a ring, though one was asked for."""
    lengths = f"of {queries} queries over {keys} keys" if queries != keys else f"of {queries} tokens"
    why = "a ring needs as many keys as queries" if queries != keys else "its mask or its length leaves no ring"
    yield f'cp="ring": attention {lengths} runs without a ring ({why}); the other ways are planned for it'


def _whole_sequence(length: int, size: int, axis: str, picked: str | None) -> Iterator[str]:
    """Of an attention that an axis leaves whole."""
    if length % size and picked is None:
        least = MINIMUM_UNEVEN_BLOCKS * size
        short = f" and has fewer than {least} tokens" if length < least else ""
        yield (
            f"the sequence of {length} does not divide by {axis}{short}: attention runs replicated over it; pad the "
            f"sequence to {_padded(length, size)}, or ask for a size that divides it"
        )


def _heads(heads: int, size: int, axis: str, picked: str | None) -> Iterator[str]:
    """Of an attention whose key heads an axis cannot split, though Ulysses was asked for."""
    if heads % size == 0:
        return
    inner = math.gcd(heads, size)
    levels = f'dims={{"cp": {size // inner}, "cp_inner": {inner}}} without cp= may run a ring of Ulysses; '
    instead = f"attention splits {INSTEAD[picked]}" if picked in INSTEAD else "attention runs replicated over it"
    yield (
        f'cp="ulysses": {heads} key heads do not divide by {axis}: {instead}; {levels if inner > 1 else ""}'
        'cp="ring" keeps keys and values split'
    )


def _order(length: int, sizes: Sequence[int], mesh: Mesh, rings: Sequence[int]) -> Iterator[str]:
    """Of a causal attention whose sequence cannot be dealt out in zigzag order."""
    ranks = math.prod(sizes)
    if length % (2 * ranks) == 0:
        return
    axes = " x ".join(f"{mesh.axis_names[axis]}={mesh.shape[axis]}" for axis in rings)
    yield (
        f"the sequence of {length} does not divide by 2 x {axes}: zigzag order, in which causal attention costs all "
        f"ranks alike, needs that; in plain order the last of {ranks} ranks computes {2 - 1 / ranks:.2g} times the "
        f"average: pad the sequence to {_padded(length, 2 * ranks)}"
    )


def _padded(length: int, size: int) -> int:
    return -(-length // size) * size

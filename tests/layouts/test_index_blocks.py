"""Blocks of indices against masks: what they have in common, beyond each other, in parts, and how one is copied."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.layouts.index_blocks import (
    Block,
    ascending,
    block_of,
    block_shape,
    boxes,
    common,
    cut_block,
    elements,
    whole_block,
    without,
)
from autopar.layouts.placement import Layout, Mesh, Replicate, Shard

SHAPE = (12, 8, 6)
R = Replicate()


def indices(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [index for start, length in runs for index in range(start, start + length)]


def mask(block: Block, shape: tuple[int, ...] = SHAPE) -> NDArray[np.bool_]:
    found = np.zeros(shape, dtype=bool)
    found[np.ix_(*map(indices, block))] = True
    return found


def some_block(draw: random.Random) -> Block:
    """Of one rank under a layout of two axes, in the order in which it lies there."""
    mesh = Mesh(("a", "b"), draw.choice([(2, 2), (3, 2), (1, 4), (2, 3)]))
    kinds: list[Layout] = [
        (R, R),
        (Shard(0), R),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(2)),
        (R, Shard(0, split=3)),
        (R, Shard(1, split=2, zigzag=True)),
        (Shard(0, order=(3, 0, 5, 1, 2, 11, 4, 10, 6, 9, 8, 7)), Shard(2)),
    ]
    return block_of(SHAPE, draw.choice(kinds), mesh, draw.randrange(mesh.size))


@pytest.mark.parametrize("seed", range(60))
def test_blocks_are_joined_and_taken_apart_as_sets_are(seed: int) -> None:
    draw = random.Random(seed)
    one, other = ascending(some_block(draw)), ascending(some_block(draw))
    both = common(one, other)
    assert (np.zeros(SHAPE, bool) if both is None else mask(both)).tolist() == (mask(one) & mask(other)).tolist()
    beyond = without(one, other)
    assert sum((mask(each).astype(int) for each in beyond), np.zeros(SHAPE, int)).tolist() == (
        mask(one) & ~mask(other)
    ).astype(int).tolist()
    assert len(beyond) <= len(SHAPE)
    most = draw.choice([1, 5, 24, 1000])
    parts = list(cut_block(one, most))
    assert all(0 < elements(part) <= most for part in parts)
    assert (sum((mask(part).astype(int) for part in parts), np.zeros(SHAPE, int)) == mask(one)).all()


@pytest.mark.parametrize("seed", range(60))
def test_a_part_is_copied_to_where_it_belongs(seed: int) -> None:
    draw = random.Random(seed)
    here, there = some_block(draw), some_block(draw)
    part = common(ascending(here), ascending(there))
    whole = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    source, target = whole[np.ix_(*map(indices, here))], np.full(block_shape(there), -1)
    for box in [] if part is None else boxes(here, there, part):
        to = tuple(slice(each.there, each.there + each.length) for each in box)
        target[to] = source[tuple(slice(each.here, each.here + each.length) for each in box)]
    wanted = whole[np.ix_(*map(indices, there))]
    inside = mask(here)[np.ix_(*map(indices, there))]
    assert (target == np.where(inside, wanted, -1)).all()


def test_numbers_and_empty_tensors_are_blocks_too() -> None:
    assert common((), ()) == ()
    assert without((), ()) == []
    assert elements(()) == 1
    assert list(boxes((), (), ())) == [()]
    assert elements(whole_block((0, 4))) == 0
    assert without(whole_block((0, 4)), whole_block((0, 4))) == []

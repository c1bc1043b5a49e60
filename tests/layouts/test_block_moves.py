"""Moves between layouts: the fewest bytes that there can be, from who has them, in rounds that stay within a limit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.errors import ConfigurationError
from autopar.layouts import block_moves
from autopar.layouts.block_moves import MovingTensor, in_rounds, least_bytes, moves_between, rank_moves
from autopar.layouts.index_blocks import Block, ascending, block_of
from autopar.layouts.placement import Layout, Mesh, Replicate, Shard
from tests.layouts.test_index_blocks import indices

R = Replicate()
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (24, 36),
    "fused": (36, 24),
    "vector": (24,),
    "number": (),
    "odd": (25,),
}
SIZE = 4
Lies = tuple[Mesh, dict[str, Layout], int]
"""A mesh, layouts by tensor (else whole), and the first of its ranks."""


def lies(shape: tuple[int, ...], first: int = 0, **layouts: Layout) -> Lies:
    return Mesh(("a", "b", "c")[: len(shape)], shape), layouts, first


PLANS: dict[str, Lies] = {
    "one process": lies((1,)),
    "ddp 2": lies((2,)),
    "zero 2": lies((2,), matrix=(Shard(0),), fused=(Shard(0),), vector=(Shard(0),), odd=(Shard(0),)),
    "zero 3": lies((3,), matrix=(Shard(0),), fused=(Shard(1),), vector=(Shard(0),), odd=(Shard(0),)),
    "tp 4": lies((4,), matrix=(Shard(1),), fused=(Shard(0, split=3),), vector=(Shard(0),), odd=(R,)),
    "zero x tp 4": lies(
        (2, 2),
        matrix=(Shard(0), Shard(1)),
        fused=(Shard(1), Shard(0, split=3)),
        vector=(R, Shard(0)),
        odd=(Shard(0), R),
    ),
    "hsdp 6": lies((2, 3), matrix=(R, Shard(0)), fused=(R, Shard(0)), vector=(R, Shard(0)), odd=(R, Shard(0))),
    "ep 8": lies(
        (2, 4),
        matrix=(Shard(1), Shard(0, order=(5, 0, 1, 2, 3, 4, *range(23, 5, -1)))),
        fused=(R, Shard(0)),
        vector=(Shard(0), Shard(0)),
    ),
    "zigzag 8": lies((8,), matrix=(Shard(1, split=2),), vector=(Shard(0),), odd=(Shard(0),)),
    "last two of 8": lies((2,), 6, matrix=(Shard(0),), fused=(R,)),
}


def blocks(plan: Lies, name: str) -> dict[int, Block]:
    mesh, layouts, first = plan
    layout = layouts.get(name, (R,) * len(mesh.shape))
    return {first + place: block_of(SHAPES[name], layout, mesh, place) for place in range(mesh.size)}


def tensors(before: str, after: str) -> dict[str, MovingTensor]:
    return {
        name: MovingTensor(itemsize=SIZE, held=blocks(PLANS[before], name), wanted=blocks(PLANS[after], name))
        for name in SHAPES
    }


def cells(block: Block, name: str) -> set[int]:
    """Numbers of the elements of a block."""
    return set(np.arange(math.prod(SHAPES[name])).reshape(SHAPES[name])[np.ix_(*map(indices, block))].ravel().tolist())


def brute_force_bytes(moving: dict[str, MovingTensor]) -> int:
    return SIZE * sum(
        len(cells(block, name) - (cells(tensor.held[rank], name) if rank in tensor.held else set()))
        for name, tensor in moving.items()
        for rank, block in tensor.wanted.items()
    )


@pytest.mark.exhaustive(every=7)
@pytest.mark.parametrize(("before", "after"), itertools.product(PLANS, PLANS))
def test_every_rank_gets_what_it_lacks_once_from_who_has_it(before: str, after: str) -> None:
    moving = tensors(before, after)
    moves = moves_between(moving, most_bytes=200, ranks_per_node=4)
    got: dict[tuple[str, int], list[int]] = {}
    for move in moves:
        sent = cells(move.block, move.name)
        assert move.nbytes == SIZE * len(sent) <= 200
        assert sent <= cells(moving[move.name].held[move.source], move.name)
        assert move.source != move.target
        got.setdefault((move.name, move.target), []).extend(sent)
    for name, tensor in moving.items():
        for rank, block in tensor.wanted.items():
            has = cells(tensor.held[rank], name) if rank in tensor.held else set()
            assert sorted(got.get((name, rank), [])) == sorted(cells(block, name) - has)
    assert sum(move.nbytes for move in moves) == least_bytes(moving) == brute_force_bytes(moving)


@pytest.mark.parametrize(("before", "after"), [("ddp 2", "tp 4"), ("tp 4", "zero 3"), ("ep 8", "one process")])
def test_rounds_stay_within_the_limit_and_keep_the_order_of_every_rank(before: str, after: str) -> None:
    moving = tensors(before, after)
    moves = moves_between(moving, most_bytes=100)
    numbered = in_rounds(moves, most_bytes=400)
    assert [move for _, move in numbered] == moves
    for rank in range(8):
        for end in ("source", "target"):
            mine = [(number, move) for number, move in numbered if getattr(move, end) == rank]
            assert [number for number, _ in mine] == sorted(number for number, _ in mine)
            for number in {number for number, _ in mine}:
                assert sum(move.nbytes for at, move in mine if at == number) <= 400
    sends = [move for r in range(8) for each in rank_moves(moving, moves, r, 400).rounds
             for held in each.sends.values() for move in held]  # fmt: skip
    assert sorted(map(repr, sends)) == sorted(map(repr, moves))


def test_what_several_ranks_hold_is_sent_by_all_of_them_alike() -> None:
    whole = ((0, 64),), ((0, 64),)
    tensor = MovingTensor(itemsize=4, held=dict.fromkeys(range(4), whole), wanted=dict.fromkeys(range(8), whole))
    moves = moves_between({"w": tensor}, most_bytes=64 * 64 * 4 // 8)
    sent = [sum(move.nbytes for move in moves if move.source == rank) for rank in range(8)]
    assert sent == [64 * 64 * 4] * 4 + [0] * 4


def test_the_holder_on_the_same_node_sends() -> None:
    whole = (((0, 64),),)
    tensor = MovingTensor(itemsize=4, held={0: whole, 4: whole}, wanted=dict.fromkeys(range(8), whole))
    moves = moves_between({"w": tensor}, most_bytes=64, ranks_per_node=4)
    assert moves
    assert all(move.source // 4 == move.target // 4 for move in moves)


def test_what_no_rank_holds_is_named() -> None:
    tensor = MovingTensor(itemsize=4, held={0: (((0, 4),),)}, wanted={1: (((2, 4),),)})
    with pytest.raises(ConfigurationError, match="w: rank 1 is to hold 2 elements that no rank has"):
        moves_between({"w": tensor}, most_bytes=64)


def test_a_schedule_that_forgets_what_a_rank_has_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    moving = tensors("zero 2", "tp 4")
    monkeypatch.setattr(block_moves, "_beyond", lambda wanted, _: [ascending(wanted)])
    sent = sum(move.nbytes for move in moves_between(moving, most_bytes=1 << 20))
    assert sent > 1.05 * brute_force_bytes(moving)

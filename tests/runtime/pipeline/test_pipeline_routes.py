"""Pieces between rank groups put every block together from what other ranks hold, whatever the meshes and layouts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autopar.layouts.placement import Layout, Mesh, Partial, Replicate, Shard, local_shape
from autopar.runtime.parameters import local_block
from autopar.runtime.pipeline.pipeline_routes import GroupLayout, SentPiece, route

R, S0, S1 = Replicate(), Shard(0), Shard(1)
TWO_BLOCKS = Shard(1, split=2)
SHAPE = (8, 12)


def _ends(shape: tuple[int, ...], layout: Layout, first: int) -> GroupLayout:
    mesh = Mesh(tuple("ab"[: len(shape)]), shape)
    return GroupLayout(layout=layout, mesh=mesh, ranks=tuple(range(first, first + mesh.size)))


def _received(source: GroupLayout, target: GroupLayout, pieces: tuple[SentPiece, ...]) -> dict[int, torch.Tensor]:
    whole = torch.arange(96.0).reshape(SHAPE)
    found = {}
    for place, rank in enumerate(target.ranks):
        shape = local_shape(SHAPE, target.layout, target.mesh, target.mesh.coordinate(place))
        found[rank] = torch.full(shape, -1.0)
    for piece in pieces:
        block = local_block(whole, source.layout, source.mesh, source.ranks.index(piece.source))
        piece.into(found[piece.target], piece.of(block))
    return found


def _is_right(source: GroupLayout, target: GroupLayout, pieces: tuple[SentPiece, ...]) -> bool:
    whole = torch.arange(96.0).reshape(SHAPE)
    blocks = [local_block(whole, target.layout, target.mesh, place) for place in range(len(target.ranks))]
    found = _received(source, target, pieces)
    return all(torch.equal(found[rank], block) for rank, block in zip(target.ranks, blocks, strict=True))


CASES = [
    (_ends((1,), (R,), 0), _ends((2,), (S0,), 1)),
    (_ends((2,), (S1,), 0), _ends((1,), (R,), 2)),
    (_ends((2,), (R,), 0), _ends((3,), (S0,), 2)),  # 3, 3 and 2 rows
    (_ends((3,), (S1,), 2), _ends((2,), (S0,), 0)),
    (_ends((2, 2), (S0, R), 0), _ends((2,), (S1,), 4)),
    (_ends((2,), (TWO_BLOCKS,), 0), _ends((3,), (S1,), 2)),
    (_ends((3,), (S1,), 2), _ends((2,), (TWO_BLOCKS,), 0)),
]


@pytest.mark.parametrize(("source", "target"), CASES)
def test_pieces_make_up_every_block(source: GroupLayout, target: GroupLayout) -> None:
    pieces = route(SHAPE, source, target)
    assert _is_right(source, target, pieces)
    assert not _is_right(source, target, pieces[1:])  # none is idle


def test_a_piece_in_the_wrong_place_shows() -> None:
    source, target = CASES[3]
    pieces = route(SHAPE, source, target)
    moved = dataclasses.replace(pieces[0], put=(pieces[0].put[0], pieces[1].put[1]))
    assert not _is_right(source, target, (moved, *pieces[1:]))


def test_equal_ends_go_straight_across_and_partial_sums_too() -> None:
    for layout in ((S0, R), (R, Partial()), (S1, S0), (R, R)):
        pieces = route(SHAPE, _ends((2, 2), layout, 0), _ends((2, 2), layout, 4))
        assert [(piece.source, piece.target) for piece in pieces] == [(0, 4), (1, 5), (2, 6), (3, 7)]
        assert all(piece.is_whole for piece in pieces)


def test_indices_are_put_on_a_device_once() -> None:
    source, target = CASES[3]
    for piece in route(SHAPE, source, target):
        moved = piece.on(torch.device("meta"))
        indices = [each for each in (*moved.taken, *moved.put) if each is not None]
        assert indices
        assert all(each.device.type == "meta" for each in indices)
        assert [each is None for each in moved.put] == [each is None for each in piece.put]


def test_copies_share_the_sending() -> None:
    pieces = route(SHAPE, _ends((2,), (R,), 0), _ends((4,), (S0,), 2))
    assert [piece.source for piece in pieces] == [0, 1, 0, 1]

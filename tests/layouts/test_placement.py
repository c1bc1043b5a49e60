"""What is written of a placement is read back as it was."""

from __future__ import annotations

import pytest

from autopar.errors import ConfigurationError
from autopar.layouts.placement import (
    Mesh,
    Partial,
    Replicate,
    Shard,
    format_layout,
    is_legal,
    local_runs,
    local_shape,
    parse_layout,
    parse_placement,
    uneven_pieces,
)


def test_a_layout_is_read_back_as_it_was_written() -> None:
    layout = (Shard(0), Shard(1, 3), Replicate(), Partial("max"), Shard(1, 2, zigzag=True), Shard(0, 8, zigzag=True))
    written = ["S(0)", "S(1, split=3)", "R", "P(max)", "S(1, zigzag)", "S(0, split=8, zigzag)"]
    assert format_layout(layout) == written
    assert parse_layout(format_layout(layout)) == layout


def test_text_that_is_no_placement_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'S\(a\)' is no placement"):
        parse_placement("S(a)")


def test_pieces_are_cut_unevenly_each_in_the_same_way() -> None:
    layout, mesh = (Shard(0, 2),), Mesh(("cp",), (4,))
    assert [local_runs(14, layout, 0, mesh, (r,)) for r in (0, 3)] == [((0, 2), (7, 2)), ((6, 1), (13, 1))]
    assert [local_shape((14, 3), layout, mesh, (r,)) for r in range(4)] == [(4, 3), (4, 3), (4, 3), (2, 3)]
    assert uneven_pieces((14, 3), layout, mesh) == {0: 2}
    assert not uneven_pieces((16, 3), layout, mesh)
    assert not is_legal((12,), layout, mesh)  # 6 are 2, 2, 2 and none
    assert not is_legal((15,), layout, mesh)
    both, grid = (Shard(0), Shard(0, 4)), Mesh(("dp", "cp"), (2, 3))
    assert local_shape((28,), both, grid, (1, 0)) == local_shape((28,), both[::-1], Mesh(("cp", "dp"), (3, 2)), (0, 1))
    assert local_shape((28,), both, grid, (1, 2)) == (2,)
    assert not is_legal((28,), (Shard(0), Shard(0, 4)), Mesh(("dp", "cp"), (3, 2)))  # 4 samples on 3 ranks


def test_zigzag_deals_out_the_blocks_of_a_sequence_forth_and_back() -> None:
    layout, mesh = (Shard(0, 2, zigzag=True),), Mesh(("cp",), (2,))
    assert [local_runs(8, layout, 0, mesh, (r,)) for r in (0, 1)] == [((0, 2), (6, 2)), ((2, 2), (4, 2))]
    assert not is_legal((6,), layout, mesh)  # four blocks
    assert not is_legal((8,), (Shard(0, 2, zigzag=True), Shard(0, 2)), Mesh(("cp", "tp"), (2, 2)))

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
    parse_layout,
    parse_placement,
)


def test_a_layout_is_read_back_as_it_was_written() -> None:
    layout = (Shard(0), Shard(1, 3), Replicate(), Partial("max"), Shard(1, 2, zigzag=True), Shard(0, 8, zigzag=True))
    written = ["S(0)", "S(1, split=3)", "R", "P(max)", "S(1, zigzag)", "S(0, split=8, zigzag)"]
    assert format_layout(layout) == written
    assert parse_layout(format_layout(layout)) == layout


def test_text_that_is_no_placement_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'S\(a\)' is no placement"):
        parse_placement("S(a)")


def test_zigzag_deals_out_the_blocks_of_a_sequence_forth_and_back() -> None:
    layout, mesh = (Shard(0, 2, zigzag=True),), Mesh(("cp",), (2,))
    assert [local_runs(8, layout, 0, mesh, (r,)) for r in (0, 1)] == [((0, 2), (6, 2)), ((2, 2), (4, 2))]
    assert not is_legal((6,), layout, mesh)  # four blocks
    assert not is_legal((8,), (Shard(0, 2, zigzag=True), Shard(0, 2)), Mesh(("cp", "tp"), (2, 2)))

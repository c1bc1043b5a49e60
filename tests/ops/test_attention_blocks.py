"""Blocks of a causal mask and of a window cover just what is visible, once, by squares; joined they give the whole
attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ops.attention_blocks import CAUSAL, Band, KeyBlock, RowBlock, Run, ring_offsets, ring_runs, seen_blocks
from autopar.ops.attention_formulas import ScoreOptions
from autopar.ops.attention_math import attend, attend_backward
from autopar.ops.random_index import run_indices

ROWS = (((0, 8),), ((4, 4),), ((0, 2), (6, 2)), ((2, 3), (7, 5)), ((5, 7),))
KEYS = (((0, 8),), ((3, 4),), ((0, 2), (6, 3)), ((9, 3),), ((0, 12),))


@st.composite
def runs(draw: st.DrawFn) -> tuple[Run, ...]:
    borders = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=6)))
    pairs = zip(borders[::2], borders[1::2], strict=False)
    return tuple((start, stop - start) for start, stop in pairs)


BANDS = st.one_of(
    st.just(CAUSAL), st.builds(Band.of, st.booleans(), st.integers(2, 45)), st.builds(Band, st.integers(0, 9))
)


@given(runs(), runs(), BANDS)
@settings(max_examples=300, deadline=None)
def test_blocks_cover_the_visible_pairs_once(rows: tuple[Run, ...], keys: tuple[Run, ...], band: Band) -> None:
    row_indices, key_indices = (run_indices(each, torch.device("cpu")) for each in (rows, keys))
    count = torch.zeros(len(row_indices), len(key_indices), dtype=torch.int64)
    blocks = seen_blocks(rows, keys, band)
    for block in blocks:
        for part in block.keys:
            shape = (block.stop - block.start, part.stop - part.start)
            assert part.is_whole or shape[0] == shape[1], "kernels agree on the diagonal of squares only"
            ones = torch.ones(shape, dtype=torch.int64)
            ones = ones.tril() if part.is_causal else ones.triu() if part.is_turned else ones
            count[block.start : block.stop, part.start : part.stop] += ones
    ahead = key_indices - row_indices.unsqueeze(-1)
    visible = (ahead <= band.after) & (-ahead <= band.before)
    torch.testing.assert_close(count, visible.long())
    assert band.sight(rows, keys) == ("all" if visible.all() else "some" if visible.any() else None)
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks)][:-1], "rows in order, none left"


def test_a_whole_square_is_one_block_and_keys_in_front_are_one_too() -> None:
    assert seen_blocks(((0, 8),), ((0, 8),), CAUSAL) == (RowBlock(0, 8, (KeyBlock(0, 8, True),)),)
    assert seen_blocks(((6, 2),), ((0, 2), (2, 2), (6, 2)), CAUSAL) == (
        RowBlock(0, 2, (KeyBlock(0, 4), KeyBlock(4, 6, True))),
    )


def test_a_window_is_squares_as_wide_as_what_it_shows_in_front() -> None:
    first, second, *_ = seen_blocks(((0, 12),), ((0, 12),), Band.of(True, 4))
    assert first == RowBlock(0, 3, (KeyBlock(0, 3, is_causal=True),))
    assert second == RowBlock(3, 6, (KeyBlock(0, 3, is_turned=True), KeyBlock(3, 6, is_causal=True)))
    with pytest.raises(ValueError, match="at least 2 keys"):
        Band.of(True, 1)


@pytest.mark.parametrize("length", [24, 37])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_hops_reach_as_far_as_a_causal_window(length: int, ranks: int) -> None:
    runs = ring_runs(length, ranks, zigzag=False)
    block = -(-length // ranks)
    for window in range(2, length + 2):
        wanted = min(ranks - 1, (window - 2) // block + 1)
        assert ring_offsets(runs, Band.of(True, window)) == tuple(range(wanted + 1)), window


def test_what_neighbours_on_both_sides_hold_comes_in_two_rounds() -> None:
    assert ring_offsets(ring_runs(64, 8, zigzag=False), CAUSAL) == tuple(range(8))
    assert ring_offsets(ring_runs(64, 8, zigzag=True), CAUSAL) == tuple(range(8))
    assert ring_offsets(ring_runs(64, 8, zigzag=False), Band.of(False, 4)) == (0, 1, -1)
    assert ring_offsets(ring_runs(64, 8, zigzag=True), Band.of(True, 4)) == (0, 1, -1)
    assert ring_offsets(ring_runs(64, 8, zigzag=False), Band.of(False, 11)) == (0, 1, 2, -1, -2)
    assert ring_offsets(ring_runs(64, 4, zigzag=False), Band.of(False, 40)) == (0, 1, 2, 3)
    assert ring_runs(16, 2, zigzag=True) == (((0, 4), (12, 4)), ((4, 4), (8, 4)))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (True, 6), (False, 3), (False, 5)])
@pytest.mark.parametrize("with_mask", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_blocks_give_what_the_formula_gives(
    rows: tuple[Run, ...], keys: tuple[Run, ...], groups: int, with_mask: bool, causal: bool, window: int | None
) -> None:
    torch.manual_seed(0)
    shape = (sum(length for _, length in rows), sum(length for _, length in keys))
    query, grad = (torch.randn(2, 4, shape[0], 8, dtype=torch.float64) for _ in range(2))
    key, value = torch.randn(2, groups, shape[1], 8, dtype=torch.float64), torch.randn(2, groups, shape[1], 6).double()
    mask = torch.randn(2, 1, *shape, dtype=torch.float64)
    mask[:, :, :, ::3] = -torch.inf
    options = {"is_causal": causal, "window": window, "rows": rows, "keys": keys, "mask": mask if with_mask else None}
    everything = torch.ones(2, 4, *shape, dtype=torch.bool)
    found, wanted = ScoreOptions(**options), ScoreOptions(**options, kept=everything)
    out, sums = attend(query, key, value, found)
    torch.testing.assert_close((out, sums), attend(query, key, value, wanted))
    grad = grad[..., :6]
    torch.testing.assert_close(
        attend_backward(grad, query, key, value, out, sums, found),
        attend_backward(grad, query, key, value, out, sums, wanted),
    )

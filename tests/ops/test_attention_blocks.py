"""Blocks of a causal mask cover just what is visible, once, by squares; joined they give the whole attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ops.attention_blocks import KeyBlock, RowBlock, Run, causal_blocks
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


@given(runs(), runs())
@settings(max_examples=300, deadline=None)
def test_blocks_cover_the_visible_pairs_once(rows: tuple[Run, ...], keys: tuple[Run, ...]) -> None:
    row_indices, key_indices = (run_indices(each, torch.device("cpu")) for each in (rows, keys))
    count = torch.zeros(len(row_indices), len(key_indices), dtype=torch.int64)
    blocks = causal_blocks(rows, keys)
    for block in blocks:
        for part in block.keys:
            shape = (block.stop - block.start, part.stop - part.start)
            assert not part.is_causal or shape[0] == shape[1], "kernels agree on the diagonal of squares only"
            ones = torch.ones(shape, dtype=torch.int64)
            count[block.start : block.stop, part.start : part.stop] += ones.tril() if part.is_causal else ones
    torch.testing.assert_close(count, (key_indices <= row_indices.unsqueeze(-1)).long())
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks)][:-1], "rows in order, none left"


def test_a_whole_square_is_one_block_and_keys_in_front_are_one_too() -> None:
    assert causal_blocks(((0, 8),), ((0, 8),)) == (RowBlock(0, 8, (KeyBlock(0, 8, True),)),)
    assert causal_blocks(((6, 2),), ((0, 2), (2, 2), (6, 2))) == (
        RowBlock(0, 2, (KeyBlock(0, 4), KeyBlock(4, 6, True))),
    )


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_blocks_give_what_the_formula_gives(rows: tuple[Run, ...], keys: tuple[Run, ...], groups: int) -> None:
    torch.manual_seed(0)
    shape = (sum(length for _, length in rows), sum(length for _, length in keys))
    query, grad = (torch.randn(2, 4, shape[0], 8, dtype=torch.float64) for _ in range(2))
    key, value = torch.randn(2, groups, shape[1], 8, dtype=torch.float64), torch.randn(2, groups, shape[1], 6).double()
    options = {"is_causal": True, "rows": rows, "keys": keys}
    everything = torch.ones(2, 4, *shape, dtype=torch.bool)
    found, wanted = ScoreOptions(**options), ScoreOptions(**options, kept=everything)
    out, sums = attend(query, key, value, found)
    torch.testing.assert_close((out, sums), attend(query, key, value, wanted))
    grad = grad[..., :6]
    torch.testing.assert_close(
        attend_backward(grad, query, key, value, out, sums, found),
        attend_backward(grad, query, key, value, out, sums, wanted),
    )

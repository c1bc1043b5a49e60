"""Lookups in the blocks of a table add up to the lookup in the whole table, forward and backward."""

from __future__ import annotations

import torch

from autopar.ops.masked import masked_embedding, masked_embedding_backward

ROWS, BLOCK, WIDTH = 12, 4, 3
IDS = torch.tensor([[0, 5, 11], [4, 7, 8]])


def test_lookups_in_blocks_add_up_to_the_lookup_in_the_whole_table() -> None:
    table = torch.randn(ROWS, WIDTH)
    parts = [masked_embedding(table[start : start + BLOCK], IDS, start) for start in range(0, ROWS, BLOCK)]
    torch.testing.assert_close(torch.stack(parts).sum(0), table[IDS])


def test_gradients_of_blocks_are_the_blocks_of_the_gradient() -> None:
    grad = torch.randn(*IDS.shape, WIDTH)
    whole = torch.ops.aten.embedding_dense_backward.default(grad, IDS, ROWS, 5, False)
    blocks = [masked_embedding_backward(grad, IDS, start, BLOCK, 5, False) for start in range(0, ROWS, BLOCK)]
    torch.testing.assert_close(torch.cat(blocks), whole)

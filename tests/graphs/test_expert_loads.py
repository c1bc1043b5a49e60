"""Loads: what the busiest rank expects, beside draws, and where programs say it."""

from __future__ import annotations

import pytest
import torch

from autopar.graphs.expert_loads import busiest_part


def drawn(shares: tuple[float, ...], ranks: int, rows: int) -> float:
    """The mean part of the busiest rank over many draws."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.multinomial(torch.tensor(shares), 400 * rows, replacement=True, generator=generator).view(400, rows)
    block = -(-len(shares) // ranks)
    counts = torch.stack([(ids // block == rank).sum(1) for rank in range(ranks)])
    return float(counts.max(0).values.double().mean()) / rows


ZIPF = tuple(1 / (i + 1) / sum(1 / (j + 1) for j in range(16)) for i in range(16))


@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shares", [(1 / 16,) * 16, ZIPF, (0.5, *(0.5 / 15,) * 15)], ids=["even", "zipf", "one hot"])
def test_the_busiest_rank_is_that_of_draws(shares: tuple[float, ...], ranks: int, rows: int) -> None:
    assert busiest_part(shares, ranks, rows) == pytest.approx(drawn(shares, ranks, rows), rel=0.05)


def test_one_rank_has_all_and_uneven_blocks_have_more() -> None:
    assert busiest_part((0.25,) * 4, 1, 100) == 1.0
    assert busiest_part((1 / 60,) * 60, 8, 10**9) == pytest.approx(8 / 60, rel=1e-3)

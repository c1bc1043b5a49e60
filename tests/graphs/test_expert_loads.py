"""Loads: what the busiest rank expects, beside draws, and where programs say it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.graphs.expert_loads import EXCEEDED, busiest_part, fullest_part


def drawn(shares: tuple[float, ...], ranks: int, rows: int, draws: int = 400) -> Tensor:
    """The part of the busiest rank, of many draws (draws,)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.multinomial(torch.tensor(shares), draws * rows, replacement=True, generator=generator)
    block = -(-len(shares) // ranks)
    counts = torch.stack([(ids.view(draws, rows) // block == rank).sum(1) for rank in range(ranks)])
    return counts.max(0).values.double() / rows


ZIPF = tuple(1 / (i + 1) / sum(1 / (j + 1) for j in range(16)) for i in range(16))


@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shares", [(1 / 16,) * 16, ZIPF, (0.5, *(0.5 / 15,) * 15)], ids=["even", "zipf", "one hot"])
def test_the_busiest_rank_is_that_of_draws(shares: tuple[float, ...], ranks: int, rows: int) -> None:
    assert busiest_part(shares, ranks, rows) == pytest.approx(float(drawn(shares, ranks, rows).mean()), rel=0.05)


@pytest.mark.parametrize("shares", [(1 / 16,) * 16, ZIPF], ids=["even", "zipf"])
def test_no_rank_has_more_than_the_fullest_but_in_one_step_of_a_hundred(shares: tuple[float, ...]) -> None:
    most = drawn(shares, 4, 512, draws=4000)
    above = float((most > fullest_part(shares, 4, 512)).double().mean())
    assert EXCEEDED / 3 < above < 2 * EXCEEDED


def test_one_rank_has_all_and_uneven_blocks_have_more() -> None:
    assert busiest_part((0.25,) * 4, 1, 100) == 1.0
    assert busiest_part((1 / 60,) * 60, 8, 10**9) == pytest.approx(8 / 60, rel=1e-3)

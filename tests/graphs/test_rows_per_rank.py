"""Loads: what the busiest rank expects, beside draws, and where programs say it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.graphs.rows_per_rank import EXCEEDED, busiest_part, fullest_part, hop_parts, once_per_rank, sent_parts


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


@pytest.mark.parametrize("chosen", [2, 4])
@pytest.mark.parametrize("shares", [(1 / 16,) * 16, ZIPF], ids=["even", "zipf"])
def test_tokens_that_travel_once_are_those_of_draws(shares: tuple[float, ...], chosen: int) -> None:
    """Experts drawn one after the other, each once; their parts of the rows are those that come of it."""
    generator, tokens = torch.Generator().manual_seed(1), 20000
    picked = torch.multinomial(torch.tensor(shares).expand(tokens, -1), chosen, generator=generator)
    found = tuple((picked.flatten().bincount(minlength=16).double() / picked.numel()).tolist())
    hit = torch.stack([(picked // 4 == rank).any(1) for rank in range(4)]).double().mean(1) / chosen
    assert sent_parts(found, (), 4, chosen) == pytest.approx(hit.tolist(), rel=0.01)
    assert sent_parts(found, (), 4) == pytest.approx([sum(found[i : i + 4]) for i in range(0, 16, 4)])
    if chosen == 4:
        assert once_per_rank(found, (), 4, chosen) == pytest.approx(float(hit.sum()), rel=0.01)
    nodes = torch.stack([(picked // 8 == node).any(1) for node in range(2)]).double().mean(1) / chosen
    assert hop_parts(found, (), (2,), 0, chosen) == pytest.approx(nodes.tolist(), rel=0.01)
    for node in range(2):  # two ranks have sent what goes on inside of a node
        assert hop_parts(found, (), (2, 2), node, chosen) == pytest.approx((2 * hit)[2 * node :][:2].tolist(), rel=0.01)
    assert once_per_rank(found, (), 4, 1) is None


def test_where_one_expert_has_every_token_tokens_go_there_once() -> None:
    assert sent_parts((1.0, 0.0, 0.0, 0.0), (), 2, 2) == pytest.approx((0.5, 0.0), abs=0.01)
    assert sent_parts((0.25,) * 4, (0, 1), 2, 2) == (0.0, pytest.approx(5 / 12)), "rows of copies stay"

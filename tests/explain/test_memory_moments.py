"""Totals of gradients over micro-batches are state of the optimizer in one stage, and gradients in several."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.explain.memory_pieces import GRADIENTS, OPTIMIZER, PARAMETERS
from tests.explain.test_stages import INPUTS, Blocks


@pytest.fixture(scope="module")
def planner() -> autopar.Planner:
    return autopar.Planner(Blocks(), INPUTS, cluster="2 H100-SXM", optimizer=torch.optim.AdamW)


@pytest.mark.parametrize(("dims", "copies"), [({"dp_replicate": 2}, 3), ({"pp": 2}, 2)], ids=["one", "several"])
def test_totals_of_gradients_are_counted_where_the_table_says(
    planner: autopar.Planner, dims: dict[str, int], copies: int
) -> None:
    """AdamW keeps two copies of a parameter."""
    kinds = planner.plan(dims=dims, micro_batches=4, mode="fast").memory().by_kind
    assert kinds[OPTIMIZER] == pytest.approx(copies * kinds[PARAMETERS])
    assert kinds.get(GRADIENTS, 0.0) >= (3 - copies) * kinds[PARAMETERS]

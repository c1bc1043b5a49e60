"""Context parallelism of whole models: loss and gradients are those of one rank, however attention runs."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.context_parity.check import TOLERANCE, Checked, Settings, settings_of, ways
from benchmarks.context_parity.models import MODELS

SAMPLE: dict[str, Settings] = {
    "gpt2, dropout": Settings(dims={"cp": 4}, cp="ring", zigzag=True),
    "bert, padded": Settings(dims={"cp": 4}, cp="ring"),
    "documents": Settings(dims={"cp": 2, "dp_shard": 2}, cp="ring"),
    "stack, causal, dropout": Settings(dims={"cp": 2, "cp_inner": 2}, cp="ring", zigzag=True),
    "stack": Settings(dims={"cp": 2, "tp": 2}, cp="ring"),
}


@cache
def checked(name: str) -> Checked:
    return Checked(MODELS[name])


@pytest.mark.parametrize("name", SAMPLE)
def test_a_ring_of_every_kind_of_attention_equals_one_rank(name: str) -> None:
    settings = SAMPLE[name]
    plan = checked(name).settled(settings)
    assert all(way.startswith("ring") and way.endswith("zigzag") == settings.zigzag for way in ways(plan)), ways(plan)
    assert checked(name).error(plan) < TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_way_equals_one_rank(name: str) -> None:
    errors = {str(settings): checked(name).error(checked(name).settled(settings)) for settings in settings_of(name)}
    assert max(errors.values()) < TOLERANCE, errors

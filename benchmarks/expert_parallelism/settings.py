"""Experts, their loads, and links: one line per setting, a small decoder each.

    SETTINGS["few-wide-uniform-1gbit"]           # 4 experts of 1,024, evenly loaded; four nodes of one rank at 1 Gbit/s
    SETTINGS["many-narrow-skewed-two-by-two"]    # 32 experts of 64, loads by Zipf's law; two nodes of two ranks

Few wide experts meet few tokens: their weights are dear and rows are cheap to move. Of many narrow ones each token
takes more, and there are more tokens: the opposite, or nearly so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.expert_parallelism.model import decoder, expert_layers, loads, settle
from benchmarks.plan_quality.models import Chain
from benchmarks.plan_quality.settings import SEED, Inputs, Setting

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A batch of sequences and the decoder that reads it. exponent: of the experts' loads, 0 where they are even."""

    batch: int
    length: int
    layers: int
    width: int
    heads: int
    hidden: int
    experts: int
    chosen: int
    exponent: float = 0.0


SIZES: Mapping[str, Sizes] = {
    "few-wide": Sizes(batch=8, length=128, layers=2, width=128, heads=4, hidden=1024, experts=4, chosen=2),
    "many-narrow": Sizes(batch=32, length=128, layers=2, width=128, heads=4, hidden=64, experts=32, chosen=4),
}
EXPONENTS: Mapping[str, float] = {"uniform": 0.0, "skewed": 1.0}
LINKS: Mapping[str, str] = {
    "1gbit": "flat-1gbit",
    "200mbit": "flat-200mbit",
    "two-by-two-1gbit": "two-by-two-1gbit",
    "two-by-two": "two-by-two",
}
"""Link -> preset of `benchmarks.netlab`."""


def tokens(sizes: Sizes) -> Inputs:
    """Random tokens and labels (batch, length), always the same: experts are settled by them."""
    draw = torch.randint(0, VOCABULARY, (2, sizes.batch, sizes.length), generator=torch.Generator().manual_seed(SEED))
    return {"x": draw[0].contiguous(), "labels": draw[1].contiguous()}


def build(sizes: Sizes) -> Chain:
    """The decoder, whose experts are loaded as they should be if torch's seed is `SEED`, as in a setting."""
    model = _decoder(sizes)
    for layer, bias in zip(expert_layers(model), _biases(sizes), strict=True):
        layer.bias.copy_(bias)
    return model


def measured_loads(sizes: Sizes) -> list[list[float]]:
    """Parts of all rows that the experts of every layer have in the first step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        found: list[list[float]] = loads(build(sizes), tokens(sizes)["x"]).tolist()
        return found


def setting(sizes: Sizes, preset: str) -> Setting:
    """The decoder and its tokens on a network."""
    return Setting(preset=preset, build=functools.partial(build, sizes), inputs=functools.partial(tokens, sizes))


@functools.cache
def _biases(sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """Found once, for all models that the process and its forks build."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = _decoder(sizes)
        settle(model, tokens(sizes)["x"], sizes.exponent)
        return tuple(layer.bias for layer in expert_layers(model))


def _decoder(sizes: Sizes) -> Chain:
    return decoder(
        layers=sizes.layers, width=sizes.width, hidden=sizes.hidden, heads=sizes.heads, experts=sizes.experts,
        chosen=sizes.chosen, vocabulary=VOCABULARY,
    )  # fmt: skip


SIZES_OF: Mapping[str, Sizes] = {
    f"{size}-{load}-{link}": replace(SIZES[size], exponent=exponent)
    for size in SIZES
    for load, exponent in EXPONENTS.items()
    for link in LINKS
}
SETTINGS: Mapping[str, Setting] = {
    f"{size}-{load}-{link}": setting(SIZES_OF[f"{size}-{load}-{link}"], preset)
    for size in SIZES
    for load in EXPONENTS
    for link, preset in LINKS.items()
}

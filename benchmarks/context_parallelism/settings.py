"""Lengths and links: one line per setting, a small decoder each.

    SETTINGS["4k-1gbit"]           # 4,096 tokens, four nodes of one rank at 1 Gbit/s
    SETTINGS["4k-two-by-two"]      # two nodes of two ranks at 200 Mbit/s; inside of a node the loopback

A longer sequence has a narrower model, so that no step takes minutes: the products of one layer cost 16 width^2 FLOPs
per token and pass, attention 2 S width.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.context_parallelism.model import decoder
from benchmarks.plan_quality.settings import Setting, tokens

VOCABULARY = 256
ELEMENT_BYTES = 4
"""Everything is fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A batch of sequences and the decoder that reads it."""

    batch: int
    length: int
    layers: int
    width: int
    heads: int
    kv_heads: int


SIZES: Mapping[str, Sizes] = {
    "1k": Sizes(batch=4, length=1024, layers=2, width=128, heads=8, kv_heads=2),
    "4k": Sizes(batch=1, length=4096, layers=2, width=128, heads=8, kv_heads=2),
    "16k": Sizes(batch=1, length=16384, layers=1, width=64, heads=4, kv_heads=2),
}
LINKS: Mapping[str, str] = {
    "1gbit": "flat-1gbit",
    "200mbit": "flat-200mbit",
    "two-by-two-1gbit": "two-by-two-1gbit",
    "two-by-two": "two-by-two",
}
"""Link -> preset of `benchmarks.netlab`."""


def setting(sizes: Sizes, preset: str) -> Setting:
    """The decoder and its tokens on a network."""
    build = functools.partial(
        decoder, layers=sizes.layers, width=sizes.width, hidden=2 * sizes.width, heads=sizes.heads,
        kv_heads=sizes.kv_heads, vocabulary=VOCABULARY,
    )  # fmt: skip
    return Setting(preset=preset, build=build, inputs=tokens(sizes.batch, sizes.length, VOCABULARY))


SIZES_OF: Mapping[str, Sizes] = {f"{size}-{link}": SIZES[size] for size in SIZES for link in LINKS}
SETTINGS: Mapping[str, Setting] = {
    f"{size}-{link}": setting(SIZES[size], preset) for size in SIZES for link, preset in LINKS.items()
}

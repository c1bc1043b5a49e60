"""What is trained where, as data: a model, one global batch, and the preset of the network. One line per setting.

    SETTINGS["gpt-200mbit"].model_and_inputs()      # the same in every process

Sizes are chosen so that the winner differs: wide and shallow (parameters dear, activations cheap), long sequences (the
opposite), batches too small to be split, tables that nobody wants to reduce; see "How settings were chosen" in
docs/plan-quality.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from benchmarks.netlab.presets import PRESETS, Network
from benchmarks.plan_quality.models import Pair, gpt, llama, mixture, recommender, vit
from benchmarks.vision import UNet

SEED = 0
LEARNING_RATE = 1e-2

Inputs: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """preset: of `benchmarks.netlab`; build: makes the module; inputs: one global batch, keywords of forward."""

    preset: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    @property
    def network(self) -> Network:
        return PRESETS[self.preset]

    def model_and_inputs(self) -> tuple[nn.Module, Inputs]:
        """The same in every process."""
        torch.manual_seed(SEED)
        model = self.build().train()
        return model, self.inputs()


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], Inputs]:
    """Random tokens and labels (batch, length)."""
    return lambda: {
        "x": torch.randint(0, vocabulary, (batch, length)),
        "labels": torch.randint(0, vocabulary, (batch, length)),
    }


def pictures(batch: int, size: int, classes: int) -> Callable[[], Inputs]:
    """Random images (batch, 3, size, size) and labels (batch,)."""
    return lambda: {"x": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def clicks(batch: int, rows: int, fields: int) -> Callable[[], Inputs]:
    """Random ids (batch, fields) and labels (batch,)."""
    return lambda: {"x": torch.randint(0, rows, (batch, fields)), "labels": torch.randint(0, 2, (batch,))}


def masks(batch: int, size: int, classes: int) -> Callable[[], Inputs]:
    """Random images (batch, 3, size, size) and a class per pixel (batch, size, size)."""
    return lambda: {
        "images": torch.randn(batch, 3, size, size),
        "masks": torch.randint(0, classes, (batch, size, size)),
    }


SETTINGS: Mapping[str, Setting] = {
    "gpt-1gbit": Setting(
        preset="flat-1gbit",
        build=lambda: gpt(layers=4, width=192, heads=4, vocabulary=512, positions=64),
        inputs=tokens(64, 64, 512),
    ),
    "gpt-200mbit": Setting(
        preset="flat-200mbit",
        build=lambda: gpt(layers=4, width=128, heads=4, vocabulary=256, positions=128),
        inputs=tokens(32, 128, 256),
    ),
    "gpt-long-1gbit": Setting(
        preset="flat-1gbit",
        build=lambda: gpt(layers=4, width=128, heads=4, vocabulary=256, positions=1024),
        inputs=tokens(4, 1024, 256),
    ),
    "gpt-wide-1gbit": Setting(
        preset="flat-1gbit",
        build=lambda: gpt(layers=2, width=768, heads=12, vocabulary=512, positions=128),
        inputs=tokens(4, 128, 512),
    ),
    "gpt-tiny-batch-1gbit": Setting(
        preset="flat-1gbit",
        build=lambda: gpt(layers=6, width=384, heads=8, vocabulary=512, positions=128),
        inputs=tokens(4, 128, 512),
    ),
    "gpt-two-by-two": Setting(
        preset="two-by-two",
        build=lambda: gpt(layers=4, width=256, heads=8, vocabulary=512, positions=128),
        inputs=tokens(16, 128, 512),
    ),
    "gpt-slow-node": Setting(
        preset="slow-node",
        build=lambda: gpt(layers=8, width=192, heads=4, vocabulary=512, positions=64),
        inputs=tokens(16, 64, 512),
    ),
    "gpt-wan": Setting(
        preset="slow-wan",
        build=lambda: gpt(layers=4, width=128, heads=4, vocabulary=256, positions=128),
        inputs=tokens(32, 128, 256),
    ),
    "llama-200mbit": Setting(
        preset="flat-200mbit",
        build=lambda: llama(layers=4, width=256, hidden=640, heads=8, kv_heads=4, vocabulary=512),
        inputs=tokens(16, 128, 512),
    ),
    "llama-vocabulary-1gbit": Setting(
        preset="flat-1gbit",
        build=lambda: llama(layers=4, width=256, hidden=640, heads=8, kv_heads=4, vocabulary=8192),
        inputs=tokens(16, 128, 8192),
    ),
    "vit-1gbit": Setting(
        preset="flat-1gbit",
        build=lambda: vit(layers=4, width=192, heads=4, size=64, patch=8, classes=64),
        inputs=pictures(64, 64, 64),
    ),
    "moe-200mbit": Setting(
        preset="flat-200mbit",
        build=lambda: mixture(layers=4, width=160, hidden=320, heads=4, experts=8, chosen=2, vocabulary=512),
        inputs=tokens(32, 128, 512),
    ),
    "moe-two-by-two": Setting(
        preset="two-by-two",
        build=lambda: mixture(layers=4, width=160, hidden=320, heads=4, experts=8, chosen=2, vocabulary=512),
        inputs=tokens(32, 128, 512),
    ),
    "unet-1gbit": Setting(
        preset="flat-1gbit",
        build=lambda: UNet(channels=(64, 128, 256), classes=8),
        inputs=masks(8, 48, 8),
    ),
    "recommender-200mbit": Setting(
        preset="flat-200mbit",
        build=lambda: recommender(rows=10_000, width=32, fields=8, hidden=1024, layers=4),
        inputs=clicks(4096, 10_000, 8),
    ),
    "recommender-1gbit": Setting(
        preset="flat-1gbit",
        build=lambda: recommender(rows=40_000, width=32, fields=8, hidden=512, layers=4),
        inputs=clicks(8192, 40_000, 8),
    ),
    "llama-two-by-two": Setting(
        preset="two-by-two",
        build=lambda: llama(layers=4, width=384, hidden=1024, heads=8, kv_heads=4, vocabulary=512),
        inputs=tokens(8, 128, 512),
    ),
    "vit-200mbit": Setting(
        preset="flat-200mbit",
        build=lambda: vit(layers=4, width=192, heads=4, size=64, patch=8, classes=64),
        inputs=pictures(48, 64, 64),
    ),
    "unet-200mbit": Setting(
        preset="flat-200mbit",
        build=lambda: UNet(channels=(32, 64, 128), classes=8),
        inputs=masks(32, 48, 8),
    ),
}
QUICK = ("gpt-200mbit", "recommender-200mbit")
"""What `--quick` runs: one network, so that one profile is measured."""


def vectors(batch: int, width: int) -> Callable[[], Inputs]:
    """Random inputs and targets (batch, width)."""
    return lambda: {"x": torch.randn(batch, width), "y": torch.randn(batch, width)}


SMALL: Mapping[str, Setting] = {
    "wide-pair-200mbit": Setting(preset="flat-200mbit", build=lambda: Pair(512, 2048), inputs=vectors(256, 512)),
    "long-pair-1gbit": Setting(preset="flat-1gbit", build=lambda: Pair(256, 256), inputs=vectors(8192, 256)),
}
"""Graphs whose plans are all measured (`exhaustive.py`): parameters dear, and activations dear."""

"""What is trained: a GPT whose parameters are dear to reduce and whose activations are cheap to hand on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.models import Inputs, LossOnly, gpt2, token_inputs

SEED = 0
LEARNING_RATE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model, one global batch, and the preset of the network."""

    preset: str
    layers: int
    width: int
    positions: int
    batch: int
    vocabulary: int = 512
    heads: int = 8

    def model_and_inputs(self) -> tuple[nn.Module, Inputs]:
        """The same in every process."""
        torch.manual_seed(SEED)
        model = gpt2(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            vocabulary=self.vocabulary,
            positions=self.positions,
        )
        return LossOnly(model).train(), token_inputs(self.vocabulary)(self.batch, self.positions)


SETTINGS: Mapping[str, Setting] = {
    "gpt-200mbit": Setting(preset="flat-200mbit", layers=8, width=384, positions=64, batch=16),
    "gpt-1gbit": Setting(preset="flat-1gbit", layers=8, width=384, positions=64, batch=16),
    "gpt-overlap": Setting(preset="flat-1gbit", layers=8, width=384, positions=64, batch=8),
    "gpt-small": Setting(preset="flat-200mbit", layers=4, width=128, positions=32, batch=8, heads=4),
}

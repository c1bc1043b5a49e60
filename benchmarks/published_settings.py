"""The settings of Alpa's paper (OSDI 2022) with the plans that its repository ships, found there on p3.16xlarge.

    setting.stages      ((8, 2), (8, 2), (16, 4)): layers and devices of every stage

Sources: alpa-projects/alpa, benchmark/alpa: suite_auto_gpt.py, suite_auto_moe.py, suite_wresnet.py (perf_test suites)
and the specs that they name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.models import Inputs, LossOnly, gpt2, images_and_labels, token_inputs
from benchmarks.published_models import GShard, WideResNet

SEQUENCE, GPT_VOCABULARY, MOE_VOCABULARY, CLASSES, IMAGE = 1024, 51200, 32000, 1000, 224


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One model on nodes of V100s, and Alpa's plan for it. build: makes it on the default device; inputs: of so many
    samples; widest_tp: the largest size of "tp" in the grid."""

    name: str
    gpus: int
    micro_batches: int
    stages: tuple[tuple[int, int], ...]
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    batch: int = 1024
    dtype: torch.dtype = torch.float16
    widest_tp: int = 8

    @property
    def layers(self) -> int:
        return sum(layers for layers, _ in self.stages)


def _gpt(
    name: str, gpus: int, width: int, heads: int, micro_batches: int, stages: tuple[tuple[int, int], ...]
) -> Setting:
    layers = sum(count for count, _ in stages)

    def build() -> nn.Module:
        return LossOnly(gpt2(layers=layers, width=width, heads=heads, vocabulary=GPT_VOCABULARY, positions=SEQUENCE))

    return Setting(
        name=f"GPT-{name}",
        gpus=gpus,
        micro_batches=micro_batches,
        stages=stages,
        build=build,
        inputs=lambda batch: token_inputs(GPT_VOCABULARY)(batch, SEQUENCE),
    )


def _moe(
    name: str, gpus: int, width: int, experts: int, micro_batches: int, stages: tuple[tuple[int, int], ...]
) -> Setting:
    layers = sum(count for count, _ in stages)

    def build() -> nn.Module:
        return GShard(
            layers=layers, width=width, heads=16, vocabulary=MOE_VOCABULARY, positions=SEQUENCE, experts=experts
        )

    return Setting(
        name=f"MoE-{name}",
        gpus=gpus,
        micro_batches=micro_batches,
        stages=stages,
        build=build,
        inputs=lambda batch: token_inputs(MOE_VOCABULARY)(batch, SEQUENCE),
    )


def _resnet(
    name: str, gpus: int, channels: int, widening: int, micro_batches: int, stages: tuple[tuple[int, int], ...]
) -> Setting:
    return Setting(
        name=f"WResNet-{name}",
        gpus=gpus,
        micro_batches=micro_batches,
        stages=stages,
        build=lambda: WideResNet(channels=channels, widening=widening, classes=CLASSES),
        inputs=lambda batch: images_and_labels(CLASSES)(batch, IMAGE),
        batch=1536,
        dtype=torch.float32,
    )


SETTINGS = (
    _gpt("350M", 1, 1024, 16, 512, ((24, 1),)),
    _gpt("760M", 2, 1536, 16, 128, ((12, 1),) * 2),
    _gpt("1.3B", 4, 2048, 32, 128, ((12, 2),) * 2),
    _gpt("2.6B", 8, 2560, 32, 128, ((8, 2), (8, 2), (16, 4))),
    _gpt("6.7B", 16, 4096, 32, 64, ((16, 8),) * 2),
    _gpt("15B", 32, 5120, 32, 128, ((12, 8),) * 4),
    _gpt("39B", 64, 8192, 64, 1024, ((3, 4),) * 16),
    _moe("380M", 1, 768, 8, 512, ((8, 1),)),
    _moe("690M", 2, 768, 16, 32, ((8, 2),)),
    _moe("1.3B", 4, 768, 16, 32, ((8, 2),) * 2),
    _moe("2.4B", 8, 1024, 16, 32, ((8, 4),) * 2),
    _moe("10B", 16, 1536, 32, 16, ((8, 8),) * 2),
    _moe("27B", 32, 2048, 48, 128, ((2, 4),) * 8),
    _moe("70B", 64, 2048, 64, 64, ((4, 8),) * 8),
    _resnet("250M", 1, 160, 2, 24, ((16, 1),)),
    _resnet("500M", 2, 224, 2, 24, ((16, 2),)),
    _resnet("1B", 4, 320, 2, 24, ((16, 4),)),
    _resnet("2B", 8, 448, 2, 24, ((8, 4),) * 2),
    _resnet("4B", 16, 640, 2, 32, ((5, 4), (4, 4), (7, 8))),
    _resnet("6.8B", 32, 320, 16, 32, ((5, 8), (4, 8), (4, 8), (3, 8))),
)

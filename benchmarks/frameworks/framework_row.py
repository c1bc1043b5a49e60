"""A row as data: a feature of a framework, how its loop is run, and what must come of it.

row("accelerate", "clip_grad_norm_", partial(trained, clip=0.5))
row("accelerate", "fp16", partial(trained, mixed_precision="fp16"), refused="fp32 or bf16")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch

Framework = Literal["accelerate", "trainer", "lightning", "fabric", "peft", "precision", "optimizers", "torchao"]
Precision = Literal["fp32", "fp64", "bf16", "fp16"]

PLAIN_LOOP = "model = autopar.compile(model, batch, optimizer=optimizer)"
CHANGES: Mapping[Framework, str] = MappingProxyType(
    {
        "accelerate": "from autopar.integrations.accelerate import Accelerator",
        "trainer": "from autopar.integrations.transformers import Trainer",
        "lightning": "Trainer(strategy=AutoparStrategy())",
        "fabric": "Fabric(strategy=AutoparFabricStrategy())",
        **dict.fromkeys(("peft", "precision", "optimizers", "torchao"), PLAIN_LOOP),
    }
)
"""The line that a user changes (and its import); a feature may ask for a further one."""

PROCESSES = 2
SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where a process of a row stands. ours: with autopar, on `processes`; else as the framework is, on one."""

    ours: bool
    rank: int
    processes: int
    folder: Path

    @property
    def batch(self) -> int:
        """Samples of a batch of one process, so that all of them together have as many as one alone."""
        return 8 // self.processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a loop computed: the loss of every step, the weights at the end by name, and what else it measured."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


Loop: TypeAlias = Callable[[Stand], Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRow:
    """See the module docstring. change: a line beside that of `CHANGES`; refused: what the error says, as a regular
    expression, "" where the feature works."""

    framework: Framework
    feature: str
    loop: Loop
    precision: Precision = "fp32"
    change: str = ""
    refused: str = ""

    @property
    def name(self) -> str:
        """framework/feature."""
        return f"{self.framework}/{self.feature}"


def row(framework: Framework, feature: str, loop: Loop, **more: Any) -> FrameworkRow:
    """A row; more: fields of `FrameworkRow`."""
    return FrameworkRow(framework=framework, feature=feature, loop=loop, **more)

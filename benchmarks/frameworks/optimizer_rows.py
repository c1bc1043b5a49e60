"""Rows of optimizers: each of torch in a plain loop, where parameters are stored split, and where operators are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.frameworks.framework_row import FrameworkRow, row
from benchmarks.frameworks.plain_loop import looped

PLANS: dict[str, dict[str, Any]] = {
    "dp_replicate": {"dims": {"dp_replicate": 2}},
    "dp_shard": {"dims": {"dp_shard": 2}},
    "tp": {"dims": {"tp": 2}},
    "pp": {"dims": {"pp": 2}},
}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon takes."""
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "Muon": {"lr": 0.01},
    "Adam": {"foreach": True},
    "AdamW": {"fused": True},
    "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adamax": {}, "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {},
    "Rprop": {},
}  # fmt: skip
REFUSED = {
    ("Rprop", "dp_replicate"): "mixes tensors", ("Rprop", "dp_shard"): "mixes tensors", ("Rprop", "tp"): "mixes tensors",
    ("Rprop", "pp"): "mixes tensors",
    ("Adafactor", "dp_shard"): "means of whole rows", ("Adafactor", "tp"): "means of whole rows",
    ("LBFGS", "pp"): "need all parameters",
}  # fmt: skip


def rows() -> Iterable[FrameworkRow]:
    """Every optimizer under every plan."""
    for name, settings in SETTINGS.items():
        for plan, options in PLANS.items():
            more: dict[str, Any] = {"taken": matrices} if name == "Muon" else {}
            loop = partial(looped, optimizer=getattr(torch.optim, name), settings=settings, **more, **options)
            yield row("optimizers", f"{name}, {plan}", loop, precision="bf16" if name == "Muon" else "fp64",
                      refused=REFUSED.get((name, plan), ""))  # fmt: skip


ROWS = tuple(rows())

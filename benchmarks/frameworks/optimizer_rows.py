"""Rows of optimizers: each of torch in a plain loop, where parameters are stored split, and where operators are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.frameworks.framework_row import row
from benchmarks.frameworks.plain_loop import looped

PLANS: tuple[dict[str, Any], ...] = tuple({"dims": {name: 2}} for name in ("dp_replicate", "dp_shard", "tp", "pp"))
DP, FSDP, TP, PP = PLANS


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon takes."""
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"foreach": True, "amsgrad": True},
    "AdamW": {"fused": True},
    "Adagrad": {"eps": 1e-6}, "RMSprop": {"lr": 1e-3, "momentum": 0.9, "eps": 1e-6},
    "Adadelta": {}, "Adamax": {}, "ASGD": {}, "NAdam": {}, "RAdam": {},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
}  # fmt: skip
"""Of those that act on every element alone, and of LBFGS, whose products DTensor knows. Adagrad's eps: the bias
of a key has the gradient 0, and divides rounding by rounding."""
ADAFACTOR = {"eps": (1e-6, 1e-3)}  # as Adagrad's


def of(name: str, plan: dict[str, Any], **more: Any) -> Any:
    """The loop of an optimizer."""
    return partial(looped, optimizer=getattr(torch.optim, name), settings=SETTINGS.get(name), **more, **plan)


ROWS = (
    *(row("optimizers", f"{name}, sharded", of(name, FSDP), precision="fp64") for name in SETTINGS),
    *(row("optimizers", f"{name}, tensor parallelism", of(name, TP), precision="fp64") for name in SETTINGS),
    row("optimizers", "AdamW, two stages", of("AdamW", PP), precision="fp64"),
    row("optimizers", "Muon, sharded", of("Muon", FSDP, taken=matrices), precision="bf16"),
    row("optimizers", "Muon, tensor parallelism", of("Muon", TP, taken=matrices), precision="bf16"),
    row("optimizers", "Adafactor, whole weights", partial(of("Adafactor", DP), settings=ADAFACTOR), precision="fp64"),
    row("optimizers", "Adafactor, sharded", of("Adafactor", FSDP), refused="means of whole rows and columns"),
    row("optimizers", "Adafactor, tensor parallelism", of("Adafactor", TP), refused="means of whole rows and columns"),
    row("optimizers", "Rprop", of("Rprop", DP), refused="mixes tensors of its own"),
    row("optimizers", "LBFGS, two stages", of("LBFGS", PP), refused="its products need all parameters"),
)

"""A model that drops nothing, where a package has no argument for that: the plain model draws otherwise than a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def without_dropout(model: nn.Module) -> nn.Module:
    """The model itself, with every probability of dropout, of dropped paths and of stochastic depth 0."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        elif hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
        elif hasattr(module, "dropout_prob"):  # of labels, in diffusers
            module.dropout_prob = 0.0
    return model

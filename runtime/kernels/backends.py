"""Kernels: how a graph is run. The plan says which backend, the same answer that the cost model priced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx

from autopar.errors import ConfigurationError

GraphCall: TypeAlias = Callable[..., Any]


def kernels(graph_module: fx.GraphModule, backend: str) -> GraphCall:
    """The graph as a callable: "eager" runs it node by node, "inductor" compiles it at its first call.

    Raises ConfigurationError for a backend that does not exist.
    """
    if backend == "eager":
        return graph_module
    if backend == "inductor":
        compiled: GraphCall = torch.compile(graph_module, backend="inductor", dynamic=False)
        return compiled
    raise ConfigurationError(f"kernel backend {backend!r} is unknown; the plan may say eager or inductor")

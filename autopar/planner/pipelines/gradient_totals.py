"""Adding up: what a micro-batch pays to add its gradients to their totals.

norm.bias     add_(total, g): one more small operator      layer.weight     nothing: the product adds (`added_product`)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.cost_models.operator_costs import operator_seconds
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.problem.build import Built
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.prices import Prices, tensor_bytes
from autopar.planner.problem.strategies import local_fraction


def adding_seconds(
    built: Built, labels: NDArray[np.int64], lifetimes: Lifetimes, prices: Prices
) -> Iterator[tuple[fx.Node, float]]:
    """(operator of backward that makes a gradient, seconds to add that to its total), but for products."""
    for parameter, position in lifetimes.gradient_position.items():
        source, index = lifetimes.in_order[position], built.placeholders[parameter]
        if source.meta["phase"] != "backward" or source.target is torch.ops.aten.mm.default:
            continue
        stored = built.variables[index].labels[int(labels[index])].stored
        seconds = operator_seconds(
            prices.cluster.device,
            flops=0.0,
            bytes_moved=3.0 * local_fraction(stored, shape_of(parameter), prices.mesh) * tensor_bytes(parameter),
            dtype=str(parameter.meta["val"].dtype).removeprefix("torch."),
            kind="memory",
            operator="add",
        )
        yield source, float(seconds)

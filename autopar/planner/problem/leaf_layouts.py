"""Leaves: the layouts that parameters and data may have, and what a parameter costs per step.

A parameter's label is the pair (stored, used): per axis R/R, S/S (each phase gathers again) or S/R (gathered once and
kept). So DDP, ZeRO-1/2/3, HSDP and tensor parallelism are points of one set of labels. (study: real-graph planning,
pair labels)"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from autopar.cost_models.operator_costs import OPTIMIZER, optimizer_seconds
from autopar.cost_models.optimizer_step import FUSED, Temporaries
from autopar.hardware.devices import Device
from autopar.layouts.placement import Layout, Mesh, Replicate, Shard, is_dtensor_layout, is_legal
from autopar.planner.problem.prices import Floats, Prices
from autopar.planner.problem.strategies import AxisChoice, LayoutSet, combinations, layouts_of, local_fraction
from autopar.plans.plan_value import ParameterPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter element beside the parameter: gradient and optimizer state; what a step reads and writes per
    element (bytes), by which measured curve, and the copies of the parameter that it makes for a while. update: bytes
    per element of such copies where all parameters are updated at once."""

    gradient: float
    optimizer: float
    step_traffic: float
    step_curve: str = OPTIMIZER
    step_buffers: Temporaries = FUSED
    update: float = 0.0

    def step_seconds(self, device: Device, elements: ArrayLike) -> Floats:
        """Of the optimizer's step on a device that stores so many elements of the parameter."""
        return optimizer_seconds(device, np.asarray(elements) * self.step_traffic, self.step_curve)


def parameter_labels(choices: Sequence[AxisChoice], shape: tuple[int, ...], mesh: Mesh) -> list[ParameterPlan]:
    """Every (stored, used) of a parameter; replicated first."""
    found: dict[tuple[Layout, Layout], ParameterPlan] = {}
    for stored in storable_layouts(choices, shape, mesh):
        kept = [(placement, Replicate()) if isinstance(placement, Shard) else (placement,) for placement in stored]
        for used in itertools.product(*kept):
            label = ParameterPlan(stored=stored, used=used, gradient=stored, keep_gathered=used != stored)
            found.setdefault((stored, used), label)
    return list(found.values())


def parameter_costs(
    stored: LayoutSet,
    used: LayoutSet,
    shape: tuple[int, ...],
    itemsize: int,
    state: StateBytes,
    prices: Prices,
) -> Floats:
    """(labels,) seconds per step: one gather where it is kept, and the optimizer's memory traffic."""
    elements = int(np.prod(shape, dtype=np.int64))
    gathers = prices.redistribution_table(shape, elements * itemsize, stored.distinct, used.distinct)
    held = [elements * local_fraction(layout, shape, prices.mesh) for layout in stored.distinct]
    ties = [float(prices.tie_breaks @ [p != Replicate() for p in layout]) for layout in stored.distinct]
    per_layout = state.step_seconds(prices.cluster.device, held) + np.array(ties)
    return np.asarray(gathers[stored.index, used.index] + per_layout[stored.index], dtype=np.float64)


def storable_layouts(choices: Sequence[AxisChoice], shape: tuple[int, ...], mesh: Mesh) -> list[Layout]:
    """Every layout without Partial that a tensor may have, from the choices of one axis; replicated first."""
    alternatives, picks, _ = combinations([choices] * len(mesh.shape), mesh)
    layouts = layouts_of([choice.inputs[0] for choice in alternatives], picks, shape, mesh).distinct
    return [layout for layout in layouts if is_legal(shape, layout, mesh) and is_dtensor_layout(layout)]

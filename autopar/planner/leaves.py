"""Leaves: the layouts that parameters and data may have, and what a parameter costs per step.

A parameter's label is the pair (stored, used): per axis R/R, S/S (each phase gathers again) or S/R (gathered once and
kept). So DDP, ZeRO-1/2/3, HSDP and tensor parallelism are points of one menu. (study: real-graph planning, pair labels)
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.layout import Layout, Mesh, Replicate, is_dtensor_layout, is_legal
from autopar.parallel_plan import ParameterPlan
from autopar.passes.view_layouts import canonical
from autopar.planner.factorisation import Factorisation, shape_of
from autopar.planner.prices import TIE_BREAK_SECONDS, Floats, Prices, tensor_bytes
from autopar.planner.strategies import LayoutSet, divides, local_fraction, shard_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter element beside the parameter: gradient and optimizer state; and what a step reads and
    writes per element (bytes)."""

    gradient: float
    optimizer: float
    step_traffic: float


class Leaves:
    """Menus of the placeholders of one program on one mesh, computed once per distinct shape and atoms."""

    def __init__(self, mesh: Mesh, prices: Prices, factorisation: Factorisation) -> None:
        self.mesh, self.prices, self.factorisation = mesh, prices, factorisation
        self._menus: dict[Hashable, tuple[tuple[ParameterPlan, ...], LayoutSet, LayoutSet]] = {}

    def parameter_labels(self, node: fx.Node) -> tuple[tuple[ParameterPlan, ...], LayoutSet, LayoutSet]:
        """(labels, stored layouts, used layouts) of a parameter."""
        options = shard_choices(node, 0, self.factorisation)
        key = (tuple(options), shape_of(node))
        if key not in self._menus:
            shape = shape_of(node)
            labels = []
            axis_options = [(o, kept) for o in options for kept in ((False, True) if o[1] else (False,))]
            for combination in itertools.product(axis_options, repeat=len(self.mesh.shape)):
                stored = canonical(shape, tuple(option[0] for option, _ in combination), self.mesh.shape)
                if self._fits([option for option, _ in combination]) and self._is_storable(shape, stored):
                    used = tuple(Replicate() if kept else p for p, (_, kept) in zip(stored, combination, strict=True))
                    kept_any = any(kept for _, kept in combination)
                    labels.append(ParameterPlan(stored=stored, used=used, gradient=stored, keep_gathered=kept_any))
            self._menus[key] = (
                tuple(labels),
                LayoutSet.of([label.stored for label in labels], shape, self.mesh),
                LayoutSet.of([label.used for label in labels], shape, self.mesh),
            )
        return self._menus[key]

    def parameter_costs(self, node: fx.Node, labels: Sequence[ParameterPlan], state: StateBytes) -> Floats:
        """(labels,) seconds per step: one gather where it is kept, and the optimizer's memory traffic."""
        shape, nbytes = shape_of(node), tensor_bytes(node)
        elements = nbytes / node.meta["val"].dtype.itemsize
        device = self.prices.cluster.device
        costs = []
        for label in labels:
            seconds = self.prices.redistribution_seconds(shape, nbytes, label.stored, label.used)
            traffic = state.step_traffic * elements * local_fraction(label.stored, shape, self.mesh)
            seconds += traffic / device.memory_bytes_per_second
            costs.append(seconds + TIE_BREAK_SECONDS * sum(p != Replicate() for p in label.stored))
        return np.array(costs)

    def shard_layouts(self, node: fx.Node) -> list[Layout]:
        """Every layout without Partial that a tensor may have; replicated first."""
        options = shard_choices(node, 0, self.factorisation)
        shape = shape_of(node)
        found = {
            canonical(shape, tuple(option[0] for option in combination), self.mesh.shape): None
            for combination in itertools.product(options, repeat=len(self.mesh.shape))
            if self._fits(combination)
        }
        return [layout for layout in found if self._is_storable(shape, layout)]

    def _is_storable(self, shape: tuple[int, ...], layout: Layout) -> bool:
        return is_legal(shape, layout, self.mesh) and is_dtensor_layout(layout)

    def _fits(self, options: Sequence[tuple[object, int, bool]]) -> bool:
        cuts: dict[object, tuple[int, bool, int]] = {}
        for axis, (placement, atom, uneven) in enumerate(options):
            if atom:
                cuts[placement] = (atom, uneven, cuts.get(placement, (0, False, 1))[2] * self.mesh.shape[axis])
        return all(divides(atom, cut, uneven) for atom, uneven, cut in cuts.values())

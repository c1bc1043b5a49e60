"""Memory as constraints: the moments at which a step can be fullest, as rows over the decisions.

    forward 3     states + kept gathered weights + saved values of segments 0 .. 3
    backward 3    the same, of what backward of segments 0 .. 3 still reads, + values recomputed in segment 3
                  + gradients of the segments above 3
    optimizer     states + all gradients                         (states: parameters and optimizer state)

Segments are blocks and what lies between them (`segments.py`). Saved is what a backward operator reads of the forward
pass, in its producer's layout: backward redistributes it anew, so the saved bytes do not depend on the reader. What
lives only shortly (gathered weights, buffers of collectives, gradients of activations) is no decision of one variable:
it is measured on the lowered program, moment by moment (`moments.py`), and enters as the constant of the row.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.layout import Mesh
from autopar.planner.build import Built, Variable
from autopar.planner.factorisation import shape_of
from autopar.planner.leaves import StateBytes
from autopar.planner.lifetimes import Lifetimes
from autopar.planner.prices import Floats, tensor_bytes
from autopar.planner.recomputation import RECOMPUTED, SAVED, is_made_anywhere
from autopar.planner.solver import MemoryRow
from autopar.planner.strategies import local_fraction

Moment: TypeAlias = str
OPTIMIZER: Moment = "optimizer"


def moment(phase: str, segment: int) -> Moment:
    """Name of the time that a phase spends in a segment."""
    return f"{phase} {segment}"


def memory_rows(
    built: Built,
    mesh: Mesh,
    state_bytes: Mapping[str, StateBytes],
    lifetimes: Lifetimes,
    budget_bytes: float,
    transient_bytes: Mapping[Moment, float],
) -> tuple[MemoryRow, ...]:
    """The rows for one budget in bytes per device, without those that another row implies.

    transient_bytes: what a moment holds beyond its row, where it is known.
    """
    bytes_of = _Bytes(built, mesh, state_bytes, lifetimes)
    fullest = transient_bytes.get(moment("backward", lifetimes.segments.last), 0.0)
    moments = [
        (phase, segment)
        for segment in range(lifetimes.segments.last, -1, -1)
        for phase in ("backward", "forward")
        # all of forward still lives when backward begins
        if phase == "backward" or transient_bytes.get(moment(phase, segment), 0.0) > fullest
    ]
    rows = [(moment(phase, segment), bytes_of.at(phase, segment)) for phase, segment in moments]
    rows.append((OPTIMIZER, bytes_of.at_the_end()))
    return tuple(
        MemoryRow(name=name, bytes=entries, budget_bytes=budget_bytes, constant_bytes=transient_bytes.get(name, 0.0))
        for name, entries in rows
    )


def modelled_bytes(
    built: Built, mesh: Mesh, state_bytes: Mapping[str, StateBytes], lifetimes: Lifetimes, labels: NDArray[np.int64]
) -> dict[Moment, float]:
    """What every moment holds under an assignment, as far as the rows count it."""
    bytes_of = _Bytes(built, mesh, state_bytes, lifetimes)
    phases = [(phase, s) for phase in ("forward", "backward") for s in range(lifetimes.segments.last + 1)]
    rows = {moment(phase, segment): bytes_of.at(phase, segment) for phase, segment in phases}
    rows[OPTIMIZER] = bytes_of.at_the_end()
    chosen = labels.tolist()
    return {name: sum(float(weights[chosen[index]]) for index, weights in row.items()) for name, row in rows.items()}


class _Bytes:
    """Bytes of every variable per label, and when they are there."""

    def __init__(self, built: Built, mesh: Mesh, state_bytes: Mapping[str, StateBytes], lifetimes: Lifetimes) -> None:
        self._lifetimes, self._mesh = lifetimes, mesh
        self._parameters = {
            node: (index, *_parameter_bytes(built.variables[index], node, state_bytes, mesh))
            for node, index in built.placeholders.items()
            if built.variables[index].kind == "parameter"
        }
        self._known: dict[Hashable, tuple[Floats, Floats]] = {}
        self._operators: dict[fx.Node, tuple[int, Floats, Floats]] = {}
        for node, index in built.operators.items():
            if node.meta["phase"] != "backward" and not is_made_anywhere(node):
                saved, again = self._operator_bytes(built.variables[index], node)
                if saved.any() or again.any():
                    self._operators[node] = index, saved, again

    def at(self, phase: str, segment: int) -> dict[int, Floats]:
        """Variable -> bytes per label while a phase is in a segment."""
        found: dict[int, Floats] = {}
        for node, (index, states, gradient, kept) in self._parameters.items():
            first, last = self._lifetimes.parameter_segments(node)
            bytes_ = states
            if phase == "backward" and self._lifetimes.gradient_segment.get(node, -1) > segment:
                bytes_ = bytes_ + gradient
            if kept.any() and segment >= (first if phase == "forward" else last):
                bytes_ = bytes_ + kept
            found[index] = bytes_
        for node, (index, saved, again) in self._operators.items():
            home = self._lifetimes.segment[node]
            begins = home if phase == "forward" else min(self._lifetimes.reading_segments(node))
            is_again = phase == "backward" and segment == home
            if segment >= begins:
                held = self._sum(saved, again) if is_again else saved
            elif is_again:
                held = again
            else:
                continue
            if held.any():
                found[index] = held
        return found

    def at_the_end(self) -> dict[int, Floats]:
        """Variable -> bytes per label when all gradients are there."""
        return {
            index: states + gradient if node in self._lifetimes.gradient_segment else states
            for node, (index, states, gradient, _) in self._parameters.items()
        }

    def _operator_bytes(self, variable: Variable, node: fx.Node) -> tuple[Floats, Floats]:
        """(bytes of its saved, of its recomputed outputs) per label; equal operators share the arrays."""
        outputs = tuple(self._lifetimes.saved_outputs(node))
        known = tuple((o, id(variable.layouts[o]), shape_of(node, o), tensor_bytes(node, o)) for o in outputs)
        states = None if variable.availability is None else variable.availability.tobytes()
        key = (known, states, len(variable.costs))
        if key not in self._known:
            local = np.zeros(len(variable.costs))
            for output in outputs:
                layouts = variable.layouts[output]
                if layouts is not None:
                    fractions = [local_fraction(one, shape_of(node, output), self._mesh) for one in layouts.distinct]
                    local += tensor_bytes(node, output) * np.array(fractions)[layouts.index]
            self._known[key] = self._split(variable, local, bool(self._lifetimes.kept_outputs(node)))
        return self._known[key]

    @staticmethod
    def _split(variable: Variable, local: Floats, needed: bool) -> tuple[Floats, Floats]:
        nothing = np.zeros_like(local)
        if variable.availability is None:
            return (local if needed else nothing), nothing
        return (
            np.where(variable.availability == SAVED, local, 0.0),
            np.where(variable.availability == RECOMPUTED, local, 0.0),
        )

    def _sum(self, saved: Floats, again: Floats) -> Floats:
        key = ("sum", id(saved), id(again))  # `_known` keeps both alive
        if key not in self._known:
            self._known[key] = saved + again, again
        return self._known[key][0]


def _parameter_bytes(
    variable: Variable, node: fx.Node, state_bytes: Mapping[str, StateBytes], mesh: Mesh
) -> tuple[Floats, Floats, Floats]:
    """(parameter and optimizer state, gradient, kept gathered copy) bytes of a parameter, per label."""
    shape, nbytes = shape_of(node), tensor_bytes(node)
    elements, state = math.prod(shape), state_bytes[variable.name]
    stored = np.array([local_fraction(label.stored, shape, mesh) for label in variable.labels])
    used = np.array([local_fraction(label.used, shape, mesh) for label in variable.labels])
    gathered = np.array([label.keep_gathered for label in variable.labels])
    return (
        stored * (nbytes + elements * state.optimizer),
        stored * elements * state.gradient,
        np.where(gathered, used * nbytes, 0.0),
    )

"""What a stage pays once per step and not once per micro-batch, as the runtime does it
(`passes/stages/once_per_step.py`).

    a gradient that is summed and stays as large (all_reduce)          once, whatever the plan says
    the gather of a parameter, a sum that makes a gradient smaller     once where the stage gathers once; what is
                                                                       gathered, and the whole gradient, then stay

A value follows from parameters alone where an operator of forward makes it of such values only: casts, mostly.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.one_mesh.made_once import operators_once, variables_once
from autopar.planner.problem.build import Built
from autopar.planner.problem.factorisation import Value, shape_of, value_of
from autopar.planner.problem.graph_operators import base_of
from autopar.planner.problem.prices import tensor_bytes
from autopar.planner.problem.strategies import local_fraction
from autopar.rules.engine import tensor_operands


class StepValues:
    """The variables of a solved problem that follow from parameters alone, and how large they become."""

    def __init__(self, built: Built, labels: NDArray[np.int64], lifetimes: Lifetimes, mesh: Mesh) -> None:
        self._built, self._labels, self._lifetimes, self._mesh = built, labels, lifetimes, mesh

    @cached_property
    def operators(self) -> frozenset[fx.Node]:
        """Operators of forward that follow from parameters alone."""
        return operators_once(self._built, self._lifetimes)

    @cached_property
    def variables(self) -> frozenset[int]:
        """The indices of these operators, of parameters, and of their copies."""
        return variables_once(self._built, self.operators)

    def stays_as_large(self, source: int, parameter: int) -> bool:
        """Whether a gradient that variable `source` makes is as large as the parameter is stored."""
        return self._gradient_fraction(source, parameter) <= self._stored_fraction(parameter)

    def held_bytes(self, parameter: int) -> float:
        """What one device holds of a parameter that is gathered once, beyond its block: gathered copies, and the rest
        of the total of its gradient, which is whole until it is summed over the devices."""
        node, stored = self._built.variables[parameter].node, self._stored_fraction(parameter)
        held = self._gathered_bytes((node, 0), stored * tensor_bytes(node))
        sources = self._sources.get(parameter, ())
        whole = max((self._gradient_fraction(source, parameter) for source in sources), default=stored)
        return held + max(0.0, whole - stored) * tensor_bytes(node)

    @cached_property
    def _sources(self) -> dict[int, set[int]]:
        """Parameter -> the variables that make its gradient."""
        found: dict[int, set[int]] = {}
        for edge in self._built.problem.edges:
            if self._built.variables[edge.target].kind == "parameter":
                found.setdefault(edge.target, set()).add(edge.source)
        return found

    def _gathered_bytes(self, value: Value, own: float) -> float:
        """Of all that follows from one value: casts, and gathered copies of either. own: of the value itself."""
        readers = {*self._lifetimes.forward_readers.get(value, ()), *self._lifetimes.backward_readers.get(value, ())}
        largest, held = own, 0.0
        for reader in readers:
            if reader in self.operators:
                made = self._output_fraction(reader) * tensor_bytes(reader)
                held += made + self._gathered_bytes((reader, 0), made)
            else:
                largest = max(largest, self._read_fraction(reader, value) * tensor_bytes(*value))
        return held + (largest if largest > own else 0.0)

    def _read_fraction(self, reader: fx.Node, value: Value) -> float:
        """Part of a value that an operator reads on one device."""
        index = self._built.operators[reader]
        strategies, label = self._built.variables[index].strategies, int(self._labels[index])
        assert strategies is not None
        return max(
            local_fraction(wanted.distinct[wanted.index[label]], shape_of(*value_of(operand)), self._mesh)
            for operand, wanted in zip(tensor_operands(reader), strategies.inputs, strict=True)
            if base_of(operand)[0] == value
        )

    def _output_fraction(self, node: fx.Node) -> float:
        index = self._built.operators[node]
        layouts = self._built.variables[index].layouts[0]
        assert layouts is not None
        layout = layouts.distinct[layouts.index[int(self._labels[index])]]
        return local_fraction(layout, shape_of(node), self._mesh)

    def _stored_fraction(self, parameter: int) -> float:
        variable = self._built.variables[parameter]
        stored = variable.labels[int(self._labels[parameter])].stored
        return local_fraction(stored, shape_of(variable.node), self._mesh)

    def _gradient_fraction(self, source: int, parameter: int) -> float:
        """Part of the gradient that is on one device where variable `source` has made it."""
        variable, label = self._built.variables[source], int(self._labels[source])
        size = int(np.prod(shape_of(self._built.variables[parameter].node)))
        fractions = [
            local_fraction(layouts.distinct[layouts.index[label]], shape_of(variable.node, output), self._mesh)
            for output, layouts in enumerate(variable.layouts)
            if layouts is not None and int(np.prod(shape_of(variable.node, output))) == size
        ]
        return max(fractions, default=1.0)

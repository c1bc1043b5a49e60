"""Forms of saved values as a dimension of the search: what is saved in less room is one more label of its operator.

    relu#3, saved              512 MB from forward to backward
    relu#3, saved as a mask    512 MB while forward reads it, 16 MB after that, 512 MB while backward reads it
    gelu#3, saved in 4 bits    512 MB, 136 MB, 512 MB

Making it small and large again are two kernels that read and write memory. What a form does not serve may not be made
again from it (`memory/possible_forms.py`). Masks lose nothing and may be chosen wherever memory binds; the others are
where `lossy=` allows them, and of two that cost the same the one with more bits is better (`tie_break`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autopar.cost_models.operator_costs import operator_seconds
from autopar.hardware.devices import Device
from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.possible_forms import forms_of
from autopar.planner.memory.recomputation import FORM_STATES, RECOMPUTED, SAVED
from autopar.planner.one_mesh.restrict import narrowed
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.graph_operators import base_of
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.prices import TIE_BREAK_SECONDS, Floats, tensor_bytes
from autopar.planner.problem.strategies import LayoutSet, local_fraction
from autopar.planner.solver import FORBIDDEN, Edge
from autopar.plans.plan_value import ROUNDED_BITS

WAYS = 2
"""Small, and large again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormLabels:
    """Adds labels to the problem of one mesh. rounded: forms that are allowed beside the mask; count: micro-batches of
    a step."""

    device: Device
    mesh: Mesh
    lifetimes: Lifetimes
    rounded: Sequence[str]
    count: int

    def candidates(self, built: Built) -> dict[fx.Node, tuple[str, ...]]:
        """Operators whose saved outputs have another form, with these."""
        forms = forms_of(self.lifetimes)
        results = {base_of(node)[0][0] for node in self.lifetimes.results.values()}
        found = {
            node: forms.of(node, self.rounded)
            for node in built.operators
            if node.meta["phase"] != "backward" and node not in results and self.lifetimes.saved_outputs(node)
        }
        sizes = {node: self._saved_bytes(node) for node, names in found.items() if names}
        least = LIMITS.least_in_form * sum(sizes.values())
        return {node: found[node] for node, size in sizes.items() if size >= least}

    def _saved_bytes(self, node: fx.Node) -> float:
        return float(sum(tensor_bytes(node, output) for output in self.lifetimes.saved_outputs(node)))

    def added(self, built: Built, candidates: Mapping[fx.Node, Sequence[str]]) -> Built:
        """The problem with recomputation, and these labels."""
        forms = {
            built.operators[node]: names
            for node, names in candidates.items()
            if _has_saved(built.variables[built.operators[node]])
        }
        rows = {index: _rows(built.variables[index], len(names)) for index, names in forms.items()}
        wide = narrowed(built, rows, ())
        known: dict[Hashable, Floats] = {}
        variables = list(wide.variables)
        for index, names in forms.items():
            variables[index] = self._with_forms(wide.variables[index], built.variables[index], names, known)
        problem = replace(
            wide.problem,
            node_costs=tuple(variable.costs for variable in variables),
            edges=tuple(self._served(edge, variables, forms, known) for edge in wide.problem.edges),
        )
        return replace(wide, problem=problem, variables=variables)

    def _with_forms(
        self, wide: Variable, before: Variable, names: Sequence[str], known: dict[Hashable, Floats]
    ) -> Variable:
        assert before.availability is not None
        assert wide.availability is not None
        saved = before.availability == SAVED
        more = int(saved.sum())
        key = (id(wide.costs), tuple(names), *map(id, before.layouts), self._saved_bytes(wide.node))
        if key not in known:
            extra = [self._seconds(before, name)[saved] for name in names]
            known[key] = wide.costs + np.concatenate([np.zeros(len(wide.costs) - more * len(names)), *extra])
        states = wide.availability.copy()
        states[len(states) - more * len(names) :] = np.repeat([FORM_STATES[name] for name in names], more)
        return replace(wide, costs=known[key], availability=states)

    def _seconds(self, variable: Variable, form: str) -> Floats:
        """Of making small and large again, by label."""
        node, forms = variable.node, forms_of(self.lifetimes)
        total = np.zeros(len(variable.costs))
        for output in self.lifetimes.saved_outputs(node):
            part, layouts = forms.kept_part((node, output), form), variable.layouts[output]
            if layouts is None or part == 1.0:
                continue
            whole = tensor_bytes(node, output) * self._fractions(layouts, shape_of(node, output))
            moved = WAYS * (1 + part) * whole
            total += operator_seconds(
                self.device, flops=0, bytes_moved=moved, dtype="float32", kind="memory", kernels=WAYS
            )
        tie_break = TIE_BREAK_SECONDS * (8 / ROUNDED_BITS[form] if form in ROUNDED_BITS else 0)
        return np.asarray(self.count * total + tie_break)

    def _fractions(self, layouts: LayoutSet, shape: tuple[int, ...]) -> Floats:
        return np.array([local_fraction(layout, shape, self.mesh) for layout in layouts.distinct])[layouts.index]

    def _served(
        self,
        edge: Edge,
        variables: Sequence[Variable],
        forms: Mapping[int, Sequence[str]],
        known: dict[Hashable, Floats],
    ) -> Edge:
        """The edge, without what may not be made again from a form of its source."""
        states = variables[edge.target].availability
        if edge.source not in forms or states is None or not (states == RECOMPUTED).any():
            return edge
        source = variables[edge.source]
        refused = [
            FORM_STATES[name]
            for name in forms[edge.source]
            if not self._serves(source, name, variables[edge.target])
        ]
        assert source.availability is not None
        from_form = np.isin(source.availability, refused)
        if not from_form.any():
            return edge
        key = (id(edge.costs), from_form.tobytes(), states.tobytes())
        if key not in known:
            known[key] = edge.costs + FORBIDDEN * np.outer(from_form, states == RECOMPUTED)
        return replace(edge, costs=known[key])

    def _serves(self, source: Variable, form: str, target: Variable) -> bool:
        forms = forms_of(self.lifetimes)
        if target.kind != "copy":
            return forms.serves(source.node, form, target.node)
        outputs = self.lifetimes.saved_outputs(source.node)
        readers = {r for output in outputs for r in self.lifetimes.forward_readers.get((source.node, output), ())}
        return all(forms.serves(source.node, form, reader) for reader in readers)


def _has_saved(variable: Variable) -> bool:
    return variable.availability is not None and bool((variable.availability == SAVED).any())


def _rows(variable: Variable, times: int) -> np.ndarray:
    """All labels, and behind them again, `times` times, those that are saved as they are."""
    every = np.arange(len(variable.costs))
    assert variable.availability is not None
    return np.concatenate([every, *[every[variable.availability == SAVED]] * times])

"""Build: a program's skeleton, a mesh and prices -> `Problem`, with the meaning of every variable.

    skeleton (once per program)   slots and links: who decides, who reads whom        `skeleton.py`, `equivalence.py`
    classes  (per constraints)    slots and links that have one label set and one table  `slot_classes.py`
    label sets  (per mesh, class)  labels, their layouts and costs                    `label_sets.py`, `strategies.py`
    tables   (per mesh, class)    seconds of the redistributions between two label sets  `redistribution_tables.py`

The problem is then put together by indexing: variables of one class share their arrays by identity, which the solver's
memo relies on.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.layouts.placement import Mesh
from autopar.planner.problem.constraint_targets import bind_constraints, freed_axes, implementations_of
from autopar.planner.problem.factorisation import Factorisation, Value
from autopar.planner.problem.label_sets import LabelSet, LabelSets
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.prices import Floats, Prices
from autopar.planner.problem.read_skeleton import skeleton_of
from autopar.planner.problem.skeleton import Skeleton, SlotKind
from autopar.planner.problem.slot_classes import classify
from autopar.planner.problem.strategies import LayoutSet, Strategies
from autopar.planner.solver import Edge, Problem
from autopar.plans.plan_value import ParameterPlan
from autopar.program import Program
from autopar.request.constraints import Constraints
from autopar.rules.rule import Rule


@dataclass(slots=True, eq=False)
class Variable:
    """One decision. `layouts`: what consumers find, per output; further fields by kind."""

    kind: SlotKind
    name: str
    node: fx.Node
    layouts: tuple[LayoutSet | None, ...]
    costs: Floats
    strategies: Strategies | None = None
    labels: tuple[ParameterPlan, ...] = ()
    stored: LayoutSet | None = None
    phase: str = "forward"
    availability: NDArray[np.int64] | None = None  # per label, for backward: see `recomputation.py`
    anew: tuple[str, ...] = ()
    """Operators of backward before which it is computed once more, where it is computed again several times."""


@dataclass(slots=True, eq=False)
class Built:
    """The problem and what its variables mean. All but problem, variables and notes belong to the skeleton, which every
    mesh shares."""

    problem: Problem
    variables: list[Variable]
    operators: dict[fx.Node, int]
    placeholders: dict[fx.Node, int]
    outputs: dict[int, int]  # index into program.outputs -> variable
    copies: dict[tuple[Value, str], int]
    rules: Mapping[fx.Node, Rule]
    uncovered: list[fx.Node]
    notes: list[str]
    heavy: set[fx.Node]


def build_problem(
    program: Program,
    mesh: Mesh,
    prices: Prices,
    constraints: Constraints,
    state_bytes: Mapping[str, StateBytes],
    kernel_backend: str,
    factorisation: Factorisation,
    offered: frozenset[str] = frozenset(),
) -> Built:
    """The problem of a program on a mesh. state_bytes: per parameter name; kernel_backend: "eager" or "inductor";
    offered: names of the operator alternatives among the labels, beside those that the constraints name.

    What the user's constraints speak of is only freed from what the names of the axes ask; `restrict.py` enforces it.
    Raises ConfigurationError for a pattern that matches nothing and a pinned layout that the mesh does not allow.
    """
    skeleton = skeleton_of(program, kernel_backend, factorisation)
    freed = freed_axes(bind_constraints(program, constraints, factorisation), mesh)
    named = implementations_of(program, constraints)
    classes = classify(skeleton, _marks(skeleton, constraints, state_bytes, freed, named))
    label_sets = LabelSets(skeleton, classes, mesh, prices, constraints, state_bytes, freed, named, offered)
    tables = [label_sets.table(link) for link in classes.links]
    variables = _variables(skeleton, [label_sets.label_sets[number] for number in classes.of_slot])
    problem = Problem(
        node_costs=tuple([variable.costs for variable in variables]),
        edges=tuple(
            [
                Edge(source=link.source, target=link.target, costs=tables[number])
                for link, number in zip(skeleton.links, classes.of_link, strict=True)
            ]
        ),
        names=tuple([f"{slot.kind}:{slot.name}" for slot in skeleton.slots]),
    )
    return Built(
        problem=problem,
        variables=variables,
        operators=skeleton.operators,
        placeholders=skeleton.placeholders,
        outputs=skeleton.outputs,
        copies=skeleton.copies,
        rules=skeleton.rules,
        uncovered=skeleton.uncovered,
        notes=label_sets.notes,
        heavy=skeleton.heavy,
    )


def _variables(skeleton: Skeleton, label_sets: list[LabelSet]) -> list[Variable]:
    return [
        Variable(
            slot.kind,
            slot.name,
            slot.node,
            label_set.offered,
            label_set.costs,
            label_set.strategies,
            label_set.labels,
            label_set.wanted[0] if slot.kind == "parameter" else None,
            slot.phase,
        )
        for slot, label_set in zip(skeleton.slots, label_sets, strict=True)
    ]


def _marks(
    skeleton: Skeleton,
    constraints: Constraints,
    state_bytes: Mapping[str, StateBytes],
    freed: Mapping[fx.Node, tuple[int, ...]],
    implementations: Mapping[fx.Node, str],
) -> dict[int, Hashable]:
    """Slot -> what constraints and optimizer say about it by name, where they do: slots of one equivalence class may
    differ there."""
    found: dict[int, Hashable] = {}
    for index, slot in enumerate(skeleton.slots):
        axes = freed.get(slot.node, ())
        if slot.kind == "parameter":
            pinned = constraints.pinned.get(slot.name)
            found[index] = (axes, state_bytes[slot.name], pinned and (pinned.stored, pinned.used))
        elif axes or slot.node in implementations:
            found[index] = axes, implementations.get(slot.node) if slot.kind == "operator" else None
    return found

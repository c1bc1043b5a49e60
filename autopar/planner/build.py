"""Build: program, mesh and prices -> `Problem`, with the meaning of every variable.

One variable per operator (its strategies), per parameter (stored and used layout, kept or gathered again), per batch
input, per differentiable output, and one *shared copy* per tensor and phase with several consumers, so that a gather
that q, k and v share is paid once. An edge prices the redistribution between a producer and a consumer; views fold
away. Equal operators share their arrays by identity, which the solver's memo relies on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost_models.kernel_groups import Traffic, group_reads_writes, kernel_groups
from autopar.layout import Layout, Mesh, replicated
from autopar.parallel_plan import ParameterPlan
from autopar.passes.view_layouts import layout_before_view, viewed
from autopar.planner.constraints import (
    Constraints,
    allowed_choices,
    allowed_labels,
    gathers,
    weights_stay_split,
)
from autopar.planner.factorisation import Factorisation, Value, batch_class, shape_of
from autopar.planner.leaves import Leaves, StateBytes
from autopar.planner.operators import (
    base_of,
    is_operator,
    kernel_leaders,
    operators,
    rule_key,
    weight_matrices,
    whole_rule,
)
from autopar.planner.prices import TIE_BREAK_SECONDS, Floats, Prices, tensor_bytes
from autopar.planner.solver import FORBIDDEN, Edge, Problem
from autopar.planner.strategies import (
    LayoutSet,
    Strategies,
    choices_of,
    enumerate_strategies,
)
from autopar.planner.targets import find_wishes, freed_axes
from autopar.planner.wide_sums import keeps_sums, masters, values_summed_wide
from autopar.program import Program
from autopar.rules.engine import rule_for, tensor_operands
from autopar.rules.rule import Rule

VariableKind = Literal["operator", "parameter", "data", "copy"]
HEAVY_FLOPS_SHARE = 1e-5
"""Operators with at least this share of the program's FLOPs count as heavy."""

LABEL_LOOKUPS = ("masked_gather", "masked_scatter")
"""Implementations by which a loss finds the logit of a label."""


@dataclass(slots=True, eq=False)
class Variable:
    """One decision. `layouts`: what consumers find, per label; further fields by kind."""

    kind: VariableKind
    name: str
    node: fx.Node
    layouts: tuple[LayoutSet | None, ...]  # per output
    costs: Floats
    strategies: Strategies | None = None
    labels: tuple[ParameterPlan, ...] = ()
    stored: LayoutSet | None = None
    phase: str = "forward"
    availability: NDArray[np.int64] | None = None  # per label, for backward: see `recomputation.py`


@dataclass(slots=True, eq=False)
class Built:
    """The problem and what its variables mean."""

    problem: Problem
    variables: list[Variable]
    operators: dict[fx.Node, int]
    placeholders: dict[fx.Node, int]
    outputs: dict[int, int]  # index into program.outputs -> variable
    copies: dict[tuple[Value, str], int]
    rules: dict[fx.Node, Rule]
    uncovered: list[fx.Node]
    notes: list[str]
    heavy: set[fx.Node]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a consumer finds a value: a variable and the layouts it offers."""

    variable: int
    layouts: LayoutSet


@dataclass(slots=True, eq=False)
class _State:
    """Tables filled while building."""

    variables: list[Variable] = field(default_factory=list)
    edges: list[tuple[int, int, Floats]] = field(default_factory=list)
    sources: dict[tuple[Value, str], _Source] = field(default_factory=dict)
    copies: dict[tuple[Value, str], int] = field(default_factory=dict)


class Builder:
    """Builds one Problem; see the module docstring."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        prices: Prices,
        constraints: Constraints,
        state_bytes: dict[str, StateBytes],
        kernel_backend: str,
        factorisation: Factorisation,
    ) -> None:
        self.program, self.mesh, self.prices, self.constraints = program, mesh, prices, constraints
        self.state_bytes = state_bytes
        self.factorisation = factorisation
        self.leaves = Leaves(mesh, prices, factorisation)
        self.freed = freed_axes(find_wishes(program, constraints, factorisation), mesh)
        groups = kernel_groups(program.graph, kernel_backend)
        self.traffic = group_reads_writes(program.graph, groups)
        self.leaders = kernel_leaders(groups)
        self.rules = {node: rule for node in operators(program) if (rule := rule_for(node)) is not None}
        total = sum(rule.flops for rule in self.rules.values())
        self.heavy = {node for node, rule in self.rules.items() if rule.flops > HEAVY_FLOPS_SHARE * total}
        self.matrices = weight_matrices(program, self.heavy)
        self.uncovered = [node for node in operators(program) if node not in self.rules]
        self.batch = batch_class(program, factorisation)
        self.masters = masters(program)
        self.summed_wide = values_summed_wide(program, self.rules, self._has_batch)
        self.notes: list[str] = []
        self.state = _State()
        self.operators: dict[fx.Node, int] = {}
        self.placeholders: dict[fx.Node, int] = {}
        self.outputs: dict[int, int] = {}
        self._strategies: dict[Hashable, Strategies] = {}
        self._costs: dict[Hashable, Floats] = {}
        self._tables: dict[Hashable, Floats] = {}
        self._before: dict[Hashable, tuple[Layout | None, ...]] = {}
        self._interned: dict[tuple[tuple[int, ...], bytes], Floats] = {}

    def build(self) -> Built:
        """The whole problem, in schedule order (which the dual ascent likes)."""
        self.consumers = self._consumers()
        for node, entry in zip(self.program.placeholders, self.program.inputs, strict=True):
            if entry.role == "parameter":
                self._add_parameter(node, entry.name)
            elif entry.role == "input":
                self._add_data(node, entry.name)
            elif entry.role != "tangent":
                self._add_constant(node)
        self._add_tangents()
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self._add_constant(node)
            elif node.op == "call_function" and is_operator(node):
                self._add_operator(node)
        self._tie_outputs()
        return self._finish()

    # -- variables

    def _add(self, variable: Variable) -> int:
        self.state.variables.append(variable)
        return len(self.state.variables) - 1

    def _offer(self, node: fx.Node, index: int, layouts: Sequence[LayoutSet | None]) -> None:
        for output, layout_set in enumerate(layouts):
            if layout_set is not None:
                source = _Source(index, layout_set)
                self.state.sources[(node, output), "forward"] = source
                self.state.sources[(node, output), "backward"] = source

    def _add_constant(self, node: fx.Node) -> None:
        """Buffers, seeds and lifted constants: replicated."""
        layouts = LayoutSet((replicated(len(self.mesh.shape)),), np.zeros(1, np.int64))
        index = self._add(Variable("data", node.name, node, (layouts,), self._intern(np.zeros(1))))
        self.placeholders[node] = index
        self._offer(node, index, (layouts,))

    def _add_data(self, node: fx.Node, name: str) -> None:
        """A batch input: every rank can take its part for free."""
        layouts = self.leaves.shard_layouts(node)
        costs = self._intern(np.array([TIE_BREAK_SECONDS * (layout != layouts[0]) for layout in layouts]))
        layout_set = LayoutSet.of(layouts, shape_of(node), self.mesh)
        index = self._add(Variable("data", name, node, (layout_set,), costs))
        self.placeholders[node] = index
        self._offer(node, index, (layout_set,))

    def _add_tangents(self) -> None:
        """The tangent of the loss is replicated; the tangent of an output has that output's layout (one variable)."""
        by_name = {
            entry.name: node
            for node, entry in zip(self.program.placeholders, self.program.inputs, strict=True)
            if entry.role == "tangent"
        }
        for position, output in enumerate(self.program.outputs):
            node = by_name.get(output.name) if output.role in ("loss", "output") else None
            if node is None:
                continue
            if output.role == "loss":
                self._add_constant(node)
            else:
                self._add_data(node, output.name)
                self.outputs[position] = self.placeholders[node]

    def _add_parameter(self, node: fx.Node, name: str) -> None:
        labels, stored, used = self.leaves.parameter_labels(node)
        allowed = allowed_labels(
            labels, name, self.mesh, self.constraints, node in self.matrices, self.freed.get(node, ())
        )
        if node in self.masters:
            allowed = [i for i in allowed if not labels[i].keep_gathered] or allowed
        pick = np.array(allowed, dtype=np.int64)
        labels = tuple(labels[i] for i in allowed)
        stored = LayoutSet(stored.distinct, stored.index[pick])
        used = LayoutSet(used.distinct, used.index[pick])
        costs = self._intern(self.leaves.parameter_costs(node, labels, self.state_bytes[name]))
        variable = Variable("parameter", name, node, (used,), costs, labels=labels, stored=stored)
        index = self._add(variable)
        self.placeholders[node] = index
        self._offer(node, index, (used,))

    def _add_operator(self, node: fx.Node) -> None:
        rule = self.rules.get(node) or whole_rule(node)
        strategies = self._strategies_of(node, rule)
        traffic = self.traffic.get(node, Traffic((), ()))
        costs = self._operator_costs(node, rule, strategies, traffic)
        phase = str(node.meta["phase"])
        operands = tensor_operands(node)
        sources = [self._source(operand, phase) for operand in operands]
        index = self._add(
            Variable("operator", node.meta["operator"], node, strategies.outputs, costs, strategies=strategies)
        )
        self.operators[node] = index
        for operand, source, wanted in zip(operands, sources, strategies.inputs, strict=True):
            self._connect(source, operand, index, wanted)
        self._offer(node, index, strategies.outputs)

    def _strategies_of(self, node: fx.Node, rule: Rule) -> Strategies:
        choices = choices_of(node, rule, self.factorisation)
        is_batch = tuple(choice.part is not None and choice.atom_class == self.batch for choice in choices)
        atoms = tuple((choice.name, choice.atom) for choice in choices)
        heavy = node in self.heavy
        freed = self.freed.get(node, ())
        key = (rule_key(node, rule), atoms, is_batch, heavy, freed)
        if key not in self._strategies:
            allowed = [
                list(choices)
                if axis in freed
                else allowed_choices(
                    choices,
                    name,
                    size,
                    batch=self.batch,
                    heavy=heavy,
                    spread=self.constraints.no_replicated_compute,
                    lookups=frozenset(n for n, how in rule.implementations.items() if how in LABEL_LOOKUPS),
                )
                for axis, (name, size) in enumerate(zip(self.mesh.axis_names, self.mesh.shape, strict=True))
            ]
            strategies = enumerate_strategies(node, allowed, self.mesh)
            if strategies is None:
                self.notes.append(f"{node.meta['operator']}: its dims do not divide as the axes ask; left free")
                strategies = enumerate_strategies(node, [choices] * len(self.mesh.shape), self.mesh)
                assert strategies is not None, "replicating is always possible"
            self._strategies[key] = strategies
        return self._strategies[key]

    def _operator_costs(self, node: fx.Node, rule: Rule, strategies: Strategies, traffic: Traffic) -> Floats:
        operands = tensor_operands(node)
        reads = tuple(sorted({operands.index(read) for read in traffic.reads if read in operands}))
        leads = node in self.leaders
        key = (id(strategies), rule_key(node, rule), reads, traffic.writes, leads)
        if key not in self._costs:
            costs = self.prices.operator_costs(node, rule, strategies, traffic, leads)
            self._costs[key] = self._intern(costs)
        return self._costs[key]

    # -- edges

    def _source(self, operand: fx.Node, phase: str) -> _Source:
        value, _ = base_of(operand)
        key = (value, phase)
        consumers = self.consumers.get(key, [])
        if len(consumers) > 1 and key not in self.state.copies:
            self._add_copy(key, consumers)
        return self.state.sources[key]

    def _add_copy(self, key: tuple[Value, str], consumers: Sequence[tuple[fx.Node, int]]) -> None:
        """One shared copy of a value for all its consumers of a phase."""
        value, phase = key
        source = self.state.sources[key]
        wanted: dict[Layout, None] = dict.fromkeys(source.layouts.distinct)
        for consumer, operand_index in consumers:
            strategies = self._strategies_of(consumer, self.rules.get(consumer) or whole_rule(consumer))
            operand = tensor_operands(consumer)[operand_index]
            before = self._before_views(operand, strategies.inputs[operand_index].distinct)
            wanted.update(dict.fromkeys(layout for layout in before if layout is not None))
        layouts = LayoutSet(tuple(wanted), np.arange(len(wanted)))
        costs = self._intern(np.zeros(len(wanted)))
        node, _ = value
        index = self._add(Variable("copy", node.name, node, (layouts,), costs, phase=phase))
        self.state.copies[key] = index
        self.state.edges.append(
            (source.variable, index, self._table(value, source.layouts, layouts.distinct, layouts.index))
        )
        self.state.sources[key] = _Source(index, layouts)

    def _connect(self, source: _Source, operand: fx.Node, consumer: int, wanted: LayoutSet) -> None:
        value, _ = base_of(operand)
        before = self._before_views(operand, wanted.distinct)
        self.state.edges.append((source.variable, consumer, self._table(value, source.layouts, before, wanted.index)))

    def _table(
        self, value: Value, sources: LayoutSet, targets: tuple[Layout | None, ...], target_index: NDArray[np.int64]
    ) -> Floats:
        shape, nbytes = shape_of(*value), tensor_bytes(*value)
        guarded = self._guarded_axes(value[0])
        wide = value in self.summed_wide
        key = (shape, nbytes, sources.distinct, targets, guarded, wide)
        if key not in self._tables:
            table = self.prices.redistribution_table(shape, nbytes, sources.distinct, targets)
            for i, source in enumerate(sources.distinct):
                for j, target in enumerate(targets):
                    if target is None:
                        continue
                    if (guarded and gathers(source, target, guarded)) or (wide and not keeps_sums(source, target)):
                        table[i, j] = FORBIDDEN
            self._tables[key] = table
        return self._intern(self._tables[key][np.ix_(sources.index, target_index)])

    def _guarded_axes(self, node: fx.Node) -> tuple[int, ...]:
        """Axes over which a value may not be gathered: any for a master, which is cast first; tp for a weight."""
        if node in self.masters:
            return tuple(range(len(self.mesh.shape)))
        freed = self.freed.get(node, ())
        return tuple(a for a in weights_stay_split(self.mesh) if a not in freed) if node in self.matrices else ()

    def _before_views(self, operand: fx.Node, layouts: tuple[Layout, ...]) -> tuple[Layout | None, ...]:
        _, views = base_of(operand)
        if not views:
            return layouts
        chain = tuple((shape_of(view), shape_of(viewed(view)), str(view.args[1:])) for view in views)
        key = (chain, layouts)
        if key not in self._before:
            found: list[Layout | None] = list(layouts)
            for view in views:
                found = [None if layout is None else layout_before_view(view, layout, self.mesh) for layout in found]
            self._before[key] = tuple(found)
        return self._before[key]

    def _consumers(self) -> dict[tuple[Value, str], list[tuple[fx.Node, int]]]:
        found: dict[tuple[Value, str], list[tuple[fx.Node, int]]] = {}
        for node in operators(self.program):
            for index, operand in enumerate(tensor_operands(node)):
                value, _ = base_of(operand)
                found.setdefault((value, str(node.meta["phase"])), []).append((node, index))
        return found

    def _tie_outputs(self) -> None:
        """Gradients meet the stored layout of their parameter; mutations and the loss are replicated."""
        by_name = {
            entry.name: node
            for node, entry in zip(self.program.placeholders, self.program.inputs, strict=True)
            if entry.role in ("parameter", "buffer", "input")
        }
        for position, (node, output) in enumerate(zip(self.program.returned, self.program.outputs, strict=True)):
            if not isinstance(node, fx.Node):
                continue
            phase = "backward" if output.role == "gradient" else "forward"
            value, _ = base_of(node)
            source = self.state.sources[value, phase]
            if output.role == "gradient":
                parameter = self.placeholders[by_name[output.name]]
                stored = self.state.variables[parameter].stored
                assert stored is not None
                before = self._before_views(node, stored.distinct)
                table = self._table(value, source.layouts, before, stored.index)
                self.state.edges.append((source.variable, parameter, table))
            elif position in self.outputs:
                wanted = self.state.variables[self.outputs[position]].layouts[0]
                assert wanted is not None
                self._connect(source, node, self.outputs[position], wanted)
            elif output.role == "output":
                self._free_output(position, node, source)
            else:
                whole = replicated(len(self.mesh.shape))
                table = self._table(value, source.layouts, (whole,), np.zeros(1, np.int64))
                variable = self.state.variables[source.variable]
                variable.costs = self._intern(variable.costs + table[:, 0])

    def _free_output(self, position: int, node: fx.Node, source: _Source) -> None:
        """An output without a tangent takes any layout that is no Partial."""
        layouts = LayoutSet.of(self.leaves.shard_layouts(node), shape_of(node), self.mesh)
        variable = Variable(
            "data", self.program.outputs[position].name, node, (layouts,), self._intern(np.zeros(len(layouts.index)))
        )
        self.outputs[position] = self._add(variable)
        self._connect(source, node, self.outputs[position], layouts)

    # -- finish

    def _finish(self) -> Built:
        problem = Problem(
            node_costs=tuple(variable.costs for variable in self.state.variables),
            edges=tuple(Edge(source=u, target=v, costs=table) for u, v, table in self.state.edges),
            names=tuple(f"{variable.kind}:{variable.name}" for variable in self.state.variables),
        )
        return Built(
            problem,
            self.state.variables,
            self.operators,
            self.placeholders,
            self.outputs,
            self.state.copies,
            self.rules,
            self.uncovered,
            self.notes,
            self.heavy,
        )

    def _intern(self, array: Floats) -> Floats:
        array = np.ascontiguousarray(array, dtype=np.float64)
        return self._interned.setdefault((array.shape, array.tobytes()), array)

    def _has_batch(self, value: Value) -> bool:
        """Whether the batch is among the dims of a value: it is an activation."""
        classes = (
            self.factorisation.atom_class(value, dim, position)
            for dim in range(len(shape_of(*value)))
            for position in range(len(self.factorisation.atoms(value, dim)))
        )
        return self.batch in classes

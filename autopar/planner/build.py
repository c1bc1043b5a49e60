"""Build: program, mesh and prices -> `Problem`, with the meaning of every variable.

One variable per operator (its strategies), per parameter (stored and used layout, kept or gathered again), per batch
input, per differentiable output, and one *shared copy* per tensor and phase with several consumers, so that a gather
that q, k and v share is paid once. An edge prices the redistribution between a producer and a consumer; views fold
away. Equal operators share their arrays by identity, which the solver's memo relies on.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.cost_models.kernel_groups import Traffic, group_reads_writes, kernel_groups
from autopar.layout import Layout, Mesh, Replicate, replicated
from autopar.parallel_plan import ParameterPlan
from autopar.passes.view_layouts import canonical, layout_before_view, viewed
from autopar.planner.constraints import (
    Constraints,
    allowed_choices,
    allowed_labels,
    gathers,
    weights_stay_split,
)
from autopar.planner.factorisation import Factorisation, Value, shape_of, value_of
from autopar.planner.prices import TIE_BREAK_SECONDS, Floats, Prices, tensor_bytes
from autopar.planner.solver import FORBIDDEN, Edge, Problem
from autopar.planner.strategies import (
    LayoutSet,
    Strategies,
    choices_of,
    divides,
    enumerate_strategies,
    local_fraction,
    shard_choices,
)
from autopar.program import Program
from autopar.rules.engine import is_view, rule_for, tensor_operands
from autopar.rules.rule import Rule

VariableKind = Literal["operator", "parameter", "data", "copy"]
HEAVY_FLOPS_SHARE = 1e-5
"""Operators with at least this share of the program's FLOPs count as heavy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter element beside the parameter: gradient and optimizer state; and what a step reads and
    writes per element (bytes)."""

    gradient: float
    optimizer: float
    step_traffic: float


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
        groups = kernel_groups(program.graph, kernel_backend)
        self.traffic = group_reads_writes(program.graph, groups)
        self.leaders = _leaders(groups)
        self.rules = {node: rule for node in _operators(program) if (rule := rule_for(node)) is not None}
        total = sum(rule.flops for rule in self.rules.values())
        self.heavy = {node for node, rule in self.rules.items() if rule.flops > HEAVY_FLOPS_SHARE * total}
        self.matrices = _weights(program, self.heavy)
        self.uncovered = [node for node in _operators(program) if node not in self.rules]
        self.batch = self._batch_class()
        self.notes: list[str] = []
        self.state = _State()
        self.operators: dict[fx.Node, int] = {}
        self.placeholders: dict[fx.Node, int] = {}
        self.outputs: dict[int, int] = {}
        self._strategies: dict[Hashable, Strategies] = {}
        self._costs: dict[Hashable, Floats] = {}
        self._tables: dict[Hashable, Floats] = {}
        self._before: dict[Hashable, tuple[Layout | None, ...]] = {}
        self._leaf_sets: dict[Hashable, tuple[tuple[ParameterPlan, ...], LayoutSet, LayoutSet]] = {}
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
            elif node.op == "call_function" and _is_operator(node):
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
        layouts = self._shard_layouts(node)
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
        labels, stored, used = self._parameter_labels(node)
        allowed = allowed_labels(labels, name, self.mesh, self.constraints, node in self.matrices)
        pick = np.array(allowed, dtype=np.int64)
        labels = tuple(labels[i] for i in allowed)
        stored = LayoutSet(stored.distinct, stored.index[pick])
        used = LayoutSet(used.distinct, used.index[pick])
        costs = self._intern(self._parameter_costs(node, name, labels))
        variable = Variable("parameter", name, node, (used,), costs, labels=labels, stored=stored)
        index = self._add(variable)
        self.placeholders[node] = index
        self._offer(node, index, (used,))

    def _parameter_labels(self, node: fx.Node) -> tuple[tuple[ParameterPlan, ...], LayoutSet, LayoutSet]:
        options = shard_choices(node, 0, self.factorisation)
        key = (tuple(options), shape_of(node))
        if key not in self._leaf_sets:
            shape = shape_of(node)
            labels = []
            axis_options = [(o, kept) for o in options for kept in ((False, True) if o[1] else (False,))]
            for combination in itertools.product(axis_options, repeat=len(self.mesh.shape)):
                if self._fits([option for option, _ in combination]):
                    stored = canonical(shape, tuple(option[0] for option, _ in combination), self.mesh.shape)
                    used = tuple(Replicate() if kept else p for p, (_, kept) in zip(stored, combination, strict=True))
                    kept_any = any(kept for _, kept in combination)
                    labels.append(ParameterPlan(stored=stored, used=used, gradient=stored, keep_gathered=kept_any))
            self._leaf_sets[key] = (
                tuple(labels),
                LayoutSet.of([label.stored for label in labels], shape, self.mesh),
                LayoutSet.of([label.used for label in labels], shape, self.mesh),
            )
        return self._leaf_sets[key]

    def _fits(self, options: Sequence[tuple[object, int, bool]]) -> bool:
        cuts: dict[object, tuple[int, bool, int]] = {}
        for axis, (placement, atom, uneven) in enumerate(options):
            if atom:
                cuts[placement] = (atom, uneven, cuts.get(placement, (0, False, 1))[2] * self.mesh.shape[axis])
        return all(divides(atom, cut, uneven) for atom, uneven, cut in cuts.values())

    def _parameter_costs(self, node: fx.Node, name: str, labels: Sequence[ParameterPlan]) -> Floats:
        shape, nbytes = shape_of(node), tensor_bytes(node)
        elements = nbytes / node.meta["val"].dtype.itemsize
        device = self.prices.cluster.device
        state = self.state_bytes[name]
        costs = []
        for label in labels:
            seconds = self.prices.redistribution_seconds(shape, nbytes, label.stored, label.used)
            traffic = state.step_traffic * elements * local_fraction(label.stored, shape, self.mesh)
            seconds += traffic / device.memory_bytes_per_second
            costs.append(seconds + TIE_BREAK_SECONDS * sum(p != Replicate() for p in label.stored))
        return np.array(costs)

    def _shard_layouts(self, node: fx.Node) -> list[Layout]:
        options = shard_choices(node, 0, self.factorisation)
        shape = shape_of(node)
        found = {
            canonical(shape, tuple(option[0] for option in combination), self.mesh.shape): None
            for combination in itertools.product(options, repeat=len(self.mesh.shape))
            if self._fits(combination)
        }
        return list(found)

    def _add_operator(self, node: fx.Node) -> None:
        rule = self.rules.get(node) or _whole(node)
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
        key = (rule_key(node, rule), atoms, is_batch, heavy)
        if key not in self._strategies:
            allowed = [
                allowed_choices(
                    choices,
                    name,
                    size,
                    batch=self.batch,
                    heavy=heavy,
                    spread=self.constraints.no_replicated_compute,
                )
                for name, size in zip(self.mesh.axis_names, self.mesh.shape, strict=True)
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
            strategies = self._strategies_of(consumer, self.rules.get(consumer) or _whole(consumer))
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
        guarded = weights_stay_split(self.mesh) if value[0] in self.matrices else ()
        key = (shape, nbytes, sources.distinct, targets, guarded)
        if key not in self._tables:
            table = self.prices.redistribution_table(shape, nbytes, sources.distinct, targets)
            for i, source in enumerate(sources.distinct):
                for j, target in enumerate(targets):
                    if guarded and target is not None and gathers(source, target, guarded):
                        table[i, j] = FORBIDDEN
            self._tables[key] = table
        return self._intern(self._tables[key][np.ix_(sources.index, target_index)])

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
        for node in _operators(self.program):
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
                self._connect(
                    source, node, self.outputs[position], self.state.variables[self.outputs[position]].layouts[0]
                )  # type: ignore[arg-type]
            elif output.role == "output":
                self._free_output(position, node, source)
            else:
                whole = replicated(len(self.mesh.shape))
                table = self._table(value, source.layouts, (whole,), np.zeros(1, np.int64))
                variable = self.state.variables[source.variable]
                variable.costs = self._intern(variable.costs + table[:, 0])

    def _free_output(self, position: int, node: fx.Node, source: _Source) -> None:
        """An output without a tangent takes any layout that is no Partial."""
        layouts = LayoutSet.of(self._shard_layouts(node), shape_of(node), self.mesh)
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

    def _batch_class(self) -> Hashable:
        for node, entry in zip(self.program.placeholders, self.program.inputs, strict=True):
            if entry.role == "input" and entry.batch_dim is not None and shape_of(node)[entry.batch_dim] > 1:
                return self.factorisation.atom_class((node, 0), entry.batch_dim)
        return None


def base_of(node: fx.Node) -> tuple[Value, tuple[fx.Node, ...]]:
    """The tensor behind a chain of views, and the views from the last to the first."""
    views = []
    while is_view(node):
        views.append(node)
        node = viewed(node)
    return value_of(node), tuple(views)


def rule_key(node: fx.Node, rule: Rule) -> Hashable:
    """Equal for nodes whose rule, shapes and dtypes are equal."""
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    outputs = tuple((tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else None for t in values)
    operands = tuple((shape_of(*value_of(o)), tensor_dtype(o)) for o in tensor_operands(node))
    return node.target, rule.inputs, rule.outputs, rule.linear, tuple(rule.reductions.items()), outputs, operands


def tensor_dtype(node: fx.Node) -> torch.dtype:
    """Dtype of the tensor that a node stands for."""
    source, output = value_of(node)
    value = source.meta["val"]
    found: torch.dtype = (value[output] if isinstance(value, tuple | list) else value).dtype
    return found


def _operators(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and _is_operator(node)]


def _is_operator(node: fx.Node) -> bool:
    """Whether a node is a decision: it computes a tensor and is neither a view nor getitem."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return not is_view(node) and value_of(node)[0] is node and any(isinstance(v, torch.Tensor) for v in values)


def _whole(node: fx.Node) -> Rule:
    """The rule of an operator without one: replicated."""
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    return Rule(
        inputs=tuple(((None,),) * len(shape_of(*value_of(o))) for o in tensor_operands(node)),
        outputs=tuple(((None,),) * v.dim() if isinstance(v, torch.Tensor) else None for v in values),
        sizes={},
    )


def _leaders(groups: dict[fx.Node, int]) -> set[fx.Node]:
    seen: set[int] = set()
    leaders = set()
    for node, group in groups.items():
        if group not in seen:
            seen.add(group)
            leaders.add(node)
    return leaders


def _weights(program: Program, heavy: set[fx.Node]) -> set[fx.Node]:
    """Parameters with at least two dims that a heavy operator or a lookup reads, through casts and views."""
    parameters = {
        node
        for node, e in zip(program.placeholders, program.inputs, strict=True)
        if e.role == "parameter" and len(e.shape) > 1
    }
    found = set()
    for node in _operators(program):
        if node in heavy or "embedding" in str(node.target):
            found |= {base_of(operand)[0][0] for operand in tensor_operands(node)} & parameters
    return found

"""Equivalence: operators, leaves and tensors of which a mesh and its prices see no difference.

The 32 layers of a Llama have 4,312 operators and 140 equivalence classes: same call, same atoms of every name, same
traffic of the kernel that they run in. Whatever depends on the mesh is worked out once per equivalence class.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import fx

from autopar.cost_models.operator_sizes import RowSizes
from autopar.graphs.expert_loads import said_of
from autopar.graphs.kernel_groups import Traffic, group_reads_writes, kernel_groups
from autopar.graphs.operator_names import is_causal, window_of
from autopar.passes.view_layouts import viewed
from autopar.planner.problem.axis_choices import choices_of, shard_choices
from autopar.planner.problem.expert_exchanges import Message, expert_exchanges
from autopar.planner.problem.factorisation import Factorisation, Value, batch_class, sequence_class, shape_of, value_of
from autopar.planner.problem.graph_operators import (
    kernel_leaders,
    kernel_rows,
    kernel_shares,
    rule_key,
    tensor_dtype,
    tensor_key,
    weight_matrices,
    whole_rule,
)
from autopar.planner.problem.prices import tensor_bytes
from autopar.planner.problem.strategies import AxisChoice
from autopar.planner.problem.wide_sums import masters, values_summed_wide
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION, RING
from autopar.program import Program
from autopar.rules.alternatives import Alternative, alternatives_of, rule_as
from autopar.rules.rule import Rule

Guard: TypeAlias = Literal["master", "matrix"]
HEAVY_FLOPS_SHARE = 1e-5
"""Operators with at least this share of the program's FLOPs count as heavy."""
_NO_TRAFFIC = Traffic((), ())


@dataclass(frozen=True, slots=True, eq=False)
class Implementation:
    """One way to run equal operators: the operator that is called, its rule and what an axis may pick of it. family:
    equal for those with the same strategies; alternative: None for the operator as it was captured."""

    target: object
    rule: Rule
    choices: tuple[AxisChoice, ...]
    family: int
    alternative: Alternative | None = None

    @property
    def name(self) -> str:
        """What the plan calls it."""
        return DEFAULT_IMPLEMENTATION if self.alternative is None else self.alternative.name


@dataclass(frozen=True, slots=True, eq=False)
class OperatorEquivalence:
    """What equal operators share. `node` is one of them; implementations: as captured first; kernel_share: part of its
    kernel's bytes that it moves; kernel_rows: of another member of its kernel, by which it is priced; exchanges: what
    travels where rows go to their experts."""

    node: fx.Node
    implementations: tuple[Implementation, ...]
    heavy: bool
    traffic: Traffic
    leads_kernel: bool
    kernel_share: float
    kernel_rows: RowSizes | None
    exchanges: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LeafEquivalence:
    """What equal parameters, inputs and outputs share: `node` is one of them. Without choices: replicated."""

    node: fx.Node
    choices: tuple[AxisChoice, ...]
    is_matrix: bool = False
    is_master: bool = False
    prefers_whole: bool = False  # among equal plans the one that replicates it wins


@dataclass(frozen=True, slots=True)
class TensorEquivalence:
    """What a redistribution sees of a tensor. guard: who may not be gathered (`guards.py`); keeps_sums: its Partial
    placements stay."""

    shape: tuple[int, ...]
    nbytes: int
    guard: Guard | None
    keeps_sums: bool


Equivalence: TypeAlias = OperatorEquivalence | LeafEquivalence


def _is_causal_ring(node: fx.Node) -> bool:
    """Whether an operator is attention whose ranks would see unequal parts of a ring of neighbouring blocks; in a
    window all see as much."""
    return is_causal(node) and window_of(node) is None and any(way.name == RING for way in alternatives_of(node))


class Equivalences:
    """Numbers for the equivalence classes of one program, in the order in which they are met."""

    def __init__(self, program: Program, kernel_backend: str, factorisation: Factorisation) -> None:
        self.factorisation = factorisation
        self.rules = self.factorisation.rules
        self.batch = batch_class(program, factorisation)
        self.sequence = sequence_class(program, factorisation)
        self.balanced = self.sequence if any(map(_is_causal_ring, self.rules)) else None
        groups = kernel_groups(program.graph, kernel_backend)
        self._traffic = group_reads_writes(program.graph, groups)
        self._leaders = kernel_leaders(groups)
        self._shares = kernel_shares(groups, self._traffic)
        self._kernel_rows = kernel_rows(groups)
        self._exchanges = expert_exchanges(program)
        total = sum(rule.flops for rule in self.rules.values())
        self.heavy = {node for node, rule in self.rules.items() if rule.flops > HEAVY_FLOPS_SHARE * total}
        self._matrices = weight_matrices(program, self.heavy, self.rules)
        self._masters = masters(program)
        self._summed_wide = values_summed_wide(program, self.rules, self._has_batch)
        self.members: list[Equivalence] = []
        self.tensors: list[TensorEquivalence] = []
        self.views: list[tuple[fx.Node, ...]] = [()]  # chains, last view first
        self._numbers: dict[Hashable, int] = {}
        self._families: dict[Hashable, tuple[int, tuple[AxisChoice, ...]]] = {}
        self._rules: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._rule_keys: dict[Hashable, int] = {}
        self._tensors: dict[Value, int] = {}
        self._views: dict[Hashable, int] = {(): 0}

    def operator(self, node: fx.Node, operands: list[fx.Node]) -> int:
        """Number of an operator's equivalence class."""
        rule = self.rules.get(node) or whole_rule(node)
        own = self._implementation(node, node.target, rule, operands)
        traffic = self._traffic.get(node, _NO_TRAFFIC)
        reads = tuple([i for i, operand in enumerate(operands) if operand in traffic.reads])
        leads, heavy, share = node in self._leaders, node in self.heavy, self._shares.get(node, 1.0)
        rows, exchanges, load = self._kernel_rows.get(node), self._exchanges.get(node, ()), said_of(node)
        return self._number(
            ("operator", own.family, reads, traffic.writes, leads, share, rows, exchanges, load),
            lambda: OperatorEquivalence(
                node, (own, *self._alternatives(node, operands)), heavy, traffic, leads, share, rows, exchanges
            ),
        )

    def _alternatives(self, node: fx.Node, operands: list[fx.Node]) -> list[Implementation]:
        found = []
        for alternative in alternatives_of(node):
            rule = rule_as(node, alternative.name)
            assert rule is not None, f"{alternative.target} has no rule"
            other = self._implementation(node, alternative.target, rule, operands)
            found.append(replace(other, alternative=alternative))
        return found

    def leaf(self, kind: str, node: fx.Node) -> int:
        """Number of the equivalence class of a parameter, an input or the tangent of an output."""
        choices = shard_choices((node, 0), self.factorisation)
        matrix, master = node in self._matrices, node in self._masters
        return self._number(
            (kind, choices, tensor_key(node), matrix, master),
            lambda: LeafEquivalence(node, choices, matrix, master, prefers_whole=True),
        )

    def output(self, node: fx.Node) -> int:
        """Number of the equivalence class of an output without a tangent, which takes any layout that is no Partial."""
        choices = shard_choices((node, 0), self.factorisation, self.balanced)
        return self._number(("output", choices, tensor_key(node)), lambda: LeafEquivalence(node, choices))

    def constant(self, node: fx.Node) -> int:
        """Number of the equivalence class of buffers, seeds, lifted constants: replicated."""
        return self._number(("constant",), lambda: LeafEquivalence(node, ()))

    def tensor(self, value: Value) -> int:
        """Number of a tensor's equivalence class, into `tensors`."""
        if value not in self._tensors:
            node = value[0]
            guard: Guard | None = "master" if node in self._masters else "matrix" if node in self._matrices else None
            equivalence = TensorEquivalence(shape_of(*value), tensor_bytes(*value), guard, value in self._summed_wide)
            number = self._numbers.setdefault(equivalence, len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(equivalence)
            self._tensors[value] = number
        return self._tensors[value]

    def chain(self, views: tuple[fx.Node, ...]) -> int:
        """Number of the equivalence class of a chain of views, into `views`."""
        key = tuple([(shape_of(view), shape_of(viewed(view)), str(view.args[1:])) for view in views])
        number = self._views.setdefault(key, len(self.views))
        if number == len(self.views):
            self.views.append(views)
        return number

    def _number(self, key: Hashable, make: Callable[[], Equivalence]) -> int:
        number = self._numbers.setdefault(key, len(self.members))
        if number == len(self.members):
            self.members.append(make())
        return number

    def _implementation(self, node: fx.Node, target: object, rule: Rule, operands: list[fx.Node]) -> Implementation:
        number, names = self._rule_number(rule)
        atoms = [self.factorisation.name_atoms(node, name, rule.sizes[name]) for name in names]
        known = (self.batch, self.sequence)
        is_known = [
            tuple([(c := self.factorisation.name_atom_class(node, name, i)) in known and c for i in range(len(parts))])
            for name, parts in zip(names, atoms, strict=True)
        ]
        tensors = tuple([self._operand_key(operand) for operand in operands])
        key = (target, number, tensors, tensor_key(node), tuple(atoms), tuple(is_known), node in self.heavy)
        if key not in self._families:
            self._families[key] = len(self._families), tuple(
                choices_of(node, rule, self.factorisation, self.balanced, self.sequence)
            )
        family, choices = self._families[key]
        return Implementation(target, rule, choices, family)

    def _rule_number(self, rule: Rule) -> tuple[int, tuple[str, ...]]:
        """(number of what the rule says, its names). Equal calls share one rule object, which `rules` keeps alive."""
        known = self._rules.get(id(rule))
        if known is None:
            known = self._rule_keys.setdefault(rule_key(rule), len(self._rule_keys)), rule.names
            if rule.names:
                self._rules[id(rule)] = known
        return known

    def _operand_key(self, operand: fx.Node) -> Hashable:
        return shape_of(*value_of(operand)), tensor_dtype(operand)

    def _has_batch(self, value: Value) -> bool:
        """Whether the batch is among the dims of a value: it is an activation."""
        classes = (
            self.factorisation.atom_class(value, dim, position)
            for dim in range(len(shape_of(*value)))
            for position in range(len(self.factorisation.atoms(value, dim)))
        )
        return self.batch in classes

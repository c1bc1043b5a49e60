"""One factorisation of all dims: which part of which dim is the same thing everywhere in the graph.

    x: (batch 8, sequence 16, hidden 64) --view--> (128, 64)      dim 0 of the view has the atoms (8, 16)
    q: (128, 64) --view--> (8, 16, heads 4, 16)                   hidden gets the atoms (4, 16)

Dims that a rule calls by the same name are one class (union-find). A view, or a fused dim `(h e)` of a rule, says
that two lists of dims have the same row-major order; the boundaries of one side become cuts of the other, until
nothing changes. Each dim is then a list of atoms, and splitting an atom is a strategy: views need no decision,
sequence sharding of a flattened matmul and grouped-query heads come for free. (study: real-graph planning, atoms)
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import fx

from autopar.graphs.operator_names import operator_kind
from autopar.layouts.views import dimension_groups
from autopar.passes.view_layouts import permutation
from autopar.program import Program
from autopar.rules.engine import is_view, rule_for, tensor_operands
from autopar.rules.rule import Dim, Rule

Value: TypeAlias = tuple[fx.Node, int]  # a tensor: node and index of its output
_Key: TypeAlias = Hashable
_Side: TypeAlias = tuple[tuple[_Key, int], ...]  # (dim class, size) of the dims of one side of a group


def value_of(node: fx.Node) -> Value:
    """The tensor that a node stands for; getitem is the output of its operand."""
    if node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def shape_of(node: fx.Node, output: int = 0) -> tuple[int, ...]:
    """Global shape of one output of a node."""
    value = node.meta["val"]
    tensor = value[output] if isinstance(value, tuple | list) else value
    return tuple(tensor.shape)


class _Classes:
    """Union-find with path compression."""

    def __init__(self) -> None:
        self._parent: dict[_Key, _Key] = {}

    def root(self, key: _Key) -> _Key:
        parent = self._parent.setdefault(key, key)
        while parent != self._parent[parent]:
            self._parent[parent] = self._parent[self._parent[parent]]
            parent = self._parent[parent]
        self._parent[key] = parent
        return parent

    def join(self, first: _Key, second: _Key) -> None:
        first, second = self.root(first), self.root(second)
        if first != second:
            self._parent[second] = first


class Factorisation:
    """Atoms of every dim of every value and of every name of every rule of a program."""

    def __init__(self, program: Program) -> None:
        self._dims = _Classes()
        self._atoms = _Classes()
        self._cuts: dict[_Key, set[int]] = {}
        self._groups: dict[tuple[_Side, _Side], None] = {}
        self._of_other_lengths: list[tuple[tuple[_Key, int], tuple[_Key, int]]] = []
        self.rules: dict[fx.Node, Rule] = {}  # of every operator that has one, in program order
        self.derived: dict[Hashable, object] = {}  # what others read off the program and keep with this
        for node in program.graph.nodes:
            if node.op == "call_function":
                self._read_node(node)
        self._tie_outputs(program)
        groups = self._canonical_groups()
        self.inexpressible_groups = self._propagate(groups)
        self._match_atoms(groups)
        self._match_other_lengths()

    def atoms(self, value: Value, dim: int) -> tuple[int, ...]:
        """Sizes of the atoms of one dim, outermost first; () for size 1."""
        return self._split(self._dims.root((value, dim)), shape_of(*value)[dim])

    def name_atoms(self, node: fx.Node, name: str, size: int) -> tuple[int, ...]:
        """Sizes of the atoms of a name in the rule of `node`."""
        return self._split(self._dims.root((node, name)), size)

    def name_atom_class(self, node: fx.Node, name: str, index: int) -> Hashable:
        """What an atom of a name is: equal for atoms that are the same thing."""
        return self._atoms.root((self._dims.root((node, name)), index))

    def atom_class(self, value: Value, dim: int, index: int = 0) -> Hashable:
        """What an atom of a dim is: equal for atoms that are the same thing."""
        return self._atoms.root((self._dims.root((value, dim)), index))

    # -- reading the graph

    def _read_node(self, node: fx.Node) -> None:
        if node.target is operator.getitem or not _has_tensor(node):
            return
        if is_view(node):
            self._read_view(node)
            return
        rule = rule_for(node)
        if rule is not None:
            self.rules[node] = rule
            self._read_rule(node, rule)

    def _read_view(self, node: fx.Node) -> None:
        source = value_of(node.args[0])  # type: ignore[arg-type]
        before, after = shape_of(*source), shape_of(node)
        order = permutation(node)
        if order is not None:
            for dim, origin in enumerate(order):
                self._dims.join((source, origin), ((node, 0), dim))
            return
        for left, right in dimension_groups(before, after):
            self._relate(
                [((source, dim), before[dim]) for dim in left], [(((node, 0), dim), after[dim]) for dim in right]
            )

    def _read_rule(self, node: fx.Node, rule: Rule) -> None:
        operands = [
            (value_of(operand), tensor) for operand, tensor in zip(tensor_operands(node), rule.inputs, strict=True)
        ]
        outputs = [((node, index), tensor) for index, tensor in enumerate(rule.outputs) if tensor is not None]
        for value, tensor in operands + outputs:
            shape = shape_of(*value)
            for dim, factors in enumerate(tensor):
                if shape[dim] != 1 and any(factor is not None for factor in factors):
                    self._relate([((value, dim), shape[dim])], self._factor_keys(node, rule, value, dim, factors))

    def _factor_keys(self, node: fx.Node, rule: Rule, value: Value, dim: int, factors: Dim) -> list[tuple[_Key, int]]:
        sizes = factor_sizes(rule, factors, shape_of(*value)[dim])
        return [
            ((node, factor) if factor is not None else ("whole", value, dim, position), size)
            for position, (factor, size) in enumerate(zip(factors, sizes, strict=True))
            if size != 1
        ]

    def _relate(self, left: Sequence[tuple[_Key, int]], right: Sequence[tuple[_Key, int]]) -> None:
        if len(left) == 1 and len(right) == 1:
            if left[0][1] == right[0][1]:
                self._dims.join(left[0][0], right[0][0])
            else:
                self._of_other_lengths.append((left[0], right[0]))
        elif left and right:
            self._groups[tuple(left), tuple(right)] = None

    def _tie_outputs(self, program: Program) -> None:
        """A gradient has the dims of its parameter or input, a mutation those of its buffer, a tangent those of its
        output."""
        by_name = {
            (entry.role, entry.name): node for node, entry in zip(program.placeholders, program.inputs, strict=True)
        }
        partners = {"gradient": ("parameter", "input"), "mutation": ("buffer",), "output": ("tangent",)}
        for node, output in zip(program.returned, program.outputs, strict=True):
            found = [by_name.get((role, output.name)) for role in partners.get(output.role, ())]  # type: ignore[arg-type]
            other = next((each for each in found if each is not None), None)
            if other is not None and isinstance(node, fx.Node) and shape_of(*value_of(node)) == shape_of(other):
                for dim in range(len(shape_of(other))):
                    self._dims.join((value_of(node), dim), ((other, 0), dim))

    # -- cuts

    def _canonical_groups(self) -> list[tuple[_Side, _Side]]:
        canonical: dict[tuple[_Side, _Side], None] = {}
        for left, right in self._groups:
            canonical[self._by_class(left), self._by_class(right)] = None
        return list(canonical)

    def _by_class(self, side: _Side) -> _Side:
        return tuple((self._dims.root(key), size) for key, size in side)

    def _propagate(self, groups: list[tuple[_Side, _Side]]) -> int:
        """Copy boundaries between the sides of every group until nothing changes; returns how many cannot agree."""
        broken: set[int] = set()
        changed = True
        while changed:
            changed = False
            for index, group in enumerate(groups):
                if index in broken:
                    continue
                boundaries = sorted(set().union(*(self._boundaries(side) for side in group)))
                if not _is_chain(boundaries):
                    broken.add(index)
                    continue
                for side in group:
                    changed |= self._cut(side, boundaries)
        return len(broken)

    def _boundaries(self, side: _Side) -> set[int]:
        """Trailing products at which the row-major order of a side is cut."""
        found, trailing = set(), 1
        for key, size in reversed(side):
            found |= {trailing * cut for cut in self._cuts.get(key, ())} | {trailing}
            trailing *= size
        return found

    def _cut(self, side: _Side, boundaries: Iterable[int]) -> bool:
        changed, trailing = False, 1
        for key, size in reversed(side):
            cuts = self._cuts.setdefault(key, set())
            new = {b // trailing for b in boundaries if trailing < b < trailing * size} - cuts
            changed |= bool(new)
            cuts |= new
            trailing *= size
        return changed

    def _split(self, key: _Key, size: int) -> tuple[int, ...]:
        if size == 1:
            return ()
        edges = [size, *sorted((cut for cut in self._cuts.get(key, ()) if cut < size), reverse=True), 1]
        if any(outer % inner for outer, inner in itertools.pairwise(edges)):
            return (size,)
        return tuple(outer // inner for outer, inner in itertools.pairwise(edges))

    def _match_atoms(self, groups: list[tuple[_Side, _Side]]) -> None:
        for left, right in groups:
            first, second = self._atom_keys(left), self._atom_keys(right)
            if [size for _, size in first] == [size for _, size in second]:
                for (one, _), (other, _) in zip(first, second, strict=True):
                    self._atoms.join(one, other)

    def _match_other_lengths(self) -> None:
        """The outermost atoms of dims that a rule calls by one name are one, a few rows longer or shorter."""
        for sides in self._of_other_lengths:
            first, second = ((self._dims.root(key), size) for key, size in sides)
            if self._split(*first) and self._split(*second):
                self._atoms.join((first[0], 0), (second[0], 0))

    def _atom_keys(self, side: _Side) -> list[tuple[_Key, int]]:
        return [((key, index), atom) for key, size in side for index, atom in enumerate(self._split(key, size))]


def batch_class(program: Program, factorisation: Factorisation) -> Hashable:
    """The class of the batch atom; None where no input has a batch dim longer than 1."""
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        if entry.role == "input" and entry.batch_dim is not None and shape_of(node)[entry.batch_dim] > 1:
            return factorisation.atom_class((node, 0), entry.batch_dim)
    return None


def sequence_class(program: Program, factorisation: Factorisation) -> Hashable:
    """The class of the atom of the longest sequence that attention reads by queries, else of the dim behind the batch
    of the first input that has one longer than 1; None where there is none."""
    queries = {
        factorisation.name_atom_class(node, "s", 0): rule.sizes["s"]
        for node, rule in factorisation.rules.items()
        if operator_kind(node.target) == "attention" and "s" in rule.sizes
    }
    if queries:
        return max(queries, key=lambda found: queries[found])
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        if entry.role == "input" and entry.batch_dim == 0 and len(shape_of(node)) > 1 and shape_of(node)[1] > 1:
            return factorisation.atom_class((node, 0), 1)
    return None


def factor_sizes(rule: Rule, factors: Dim, size: int) -> tuple[int, ...]:
    """Sizes of the factors of one dim; a whole factor takes what the named ones leave."""
    named = math.prod(rule.sizes[factor] for factor in factors if factor is not None)
    return tuple(rule.sizes[factor] if factor is not None else size // named for factor in factors)


def _has_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(item, torch.Tensor) for item in values)


def _is_chain(boundaries: Sequence[int]) -> bool:
    return all(larger % smaller == 0 for smaller, larger in itertools.pairwise(boundaries))

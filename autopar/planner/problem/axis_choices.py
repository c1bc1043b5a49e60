"""Choices: what one mesh axis may pick for one operator, from its rule and the atoms of its dims.

    mm (tokens (8, 16), k) x (k, n)     replicated;  m, atom 8;  m, atom 16;  k -> Partial;  n

Where a causal attention may run as a ring (`balanced`), what may be split along its sequence may be so in zigzag order,
too: a choice of half the atom, behind a pair of pieces. The `sequence` may be split unevenly behind the batch, too: no
weight has it, whose blocks torch would read.

The choices know nothing of a mesh: they are found once per program (`skeleton.py`), and every mesh combines them
(`strategies.py`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from torch import fx

from autopar.layouts.placement import Partial, Placement, Replicate, Shard
from autopar.planner.problem.factorisation import Factorisation, Value, factor_sizes, shape_of, value_of
from autopar.planner.problem.strategies import IN_ZIGZAG, AxisChoice
from autopar.rules.engine import tensor_operands
from autopar.rules.rule import PAIR, Rule, Tensor

ANY_ORDER = frozenset({None, "attention_by_index", "ring_attention", "ring_attention_backward"})
"""Implementations to which the order of the rows of a block does not matter."""


def choices_of(
    node: fx.Node,
    rule: Rule,
    factorisation: Factorisation,
    balanced: Hashable = None,
    sequence: Hashable = None,
) -> list[AxisChoice]:
    """The choices of one axis for an operator: replicated first, then the names, then the linear patterns.

    balanced: the class of the atom that may be split in zigzag order; sequence: of that which may be split unevenly
    behind others."""
    found = [_replicated(rule)]
    for name in rule.names:
        atoms = factorisation.name_atoms(node, name, rule.sizes[name])
        for position, atom in enumerate(atoms):
            atom_class = factorisation.name_atom_class(node, name, position)
            choice = _split_choice(node, rule, name, atoms, position)
            if choice is not None:
                lengths = _other_lengths(node, rule, name)
                behind = position == len(atoms) - 1 and sequence is not None and atom_class == sequence
                uneven = _may_be_uneven(rule, name, len(atoms), (*choice[0], *choice[1]), behind)
                found.append(
                    AxisChoice(name, (name, position), atom, uneven, *choice, atom_class, other_lengths=lengths)
                )
            in_any_order = rule.implementations.get(name) in ANY_ORDER
            if balanced is None or atom_class != balanced or atom % 2 or not in_any_order:
                continue
            paired = (*atoms[:position], 2, atom // 2, *atoms[position + 1 :])
            choice = _split_choice(node, rule, name, paired, position + 1, zigzag=True)
            if choice is not None:
                part = (name + IN_ZIGZAG, position)
                found.append(AxisChoice(name, part, atom // 2, False, *choice, atom_class, zigzag=True))
    found += _pair_choices(node, rule, factorisation)
    for pattern in rule.linear:
        inputs = tuple(Partial() if marked else Replicate() for marked in pattern)
        found.append(AxisChoice("partial", None, 0, False, inputs, _everywhere(rule, Partial())))
    return found


def _pair_choices(node: fx.Node, rule: Rule, factorisation: Factorisation) -> list[AxisChoice]:
    """The choices that split an atom of one name and a range of another."""
    found = []
    for pair in rule.pairs:
        name, other = pair.split(PAIR)
        beside = (other, 0), rule.sizes[other]
        atoms = factorisation.name_atoms(node, name, rule.sizes[name])
        for position, atom in enumerate(atoms):
            rows = _split_choice(node, rule, name, atoms, position)
            ranges = _split_choice(node, rule, other, (rule.sizes[other],), 0)
            if rows is None or ranges is None:
                continue
            inputs = tuple(two if isinstance(two, Shard) else one for one, two in zip(rows[0], ranges[0], strict=True))
            outputs = tuple(two if isinstance(two, Shard) else one for one, two in zip(rows[1], ranges[1], strict=True))
            if all(isinstance(placed, Shard) for placed in (*inputs, *(o for o in outputs if o is not None))):
                atom_class = factorisation.name_atom_class(node, name, position)
                found.append(
                    AxisChoice(pair, (name, position), atom, False, inputs, outputs, atom_class, beside=beside)
                )
    return found


def shard_choices(value: Value, factorisation: Factorisation, balanced: Hashable = None) -> tuple[AxisChoice, ...]:
    """The choices of one axis for a stored tensor: replicated first, then every atom of every dim."""
    found = [AxisChoice(None, None, 0, False, (Replicate(),), ())]
    for dim in range(len(shape_of(*value))):
        atoms = factorisation.atoms(value, dim)
        for position, atom in enumerate(atoms):
            placement = Shard(dim, math.prod(atoms[:position]))
            part = f"dim {dim}", position
            found.append(AxisChoice(None, part, atom, len(atoms) == 1, (placement,), ()))
            if balanced is not None and factorisation.atom_class(value, dim, position) == balanced and not atom % 2:
                turned = Shard(dim, 2 * math.prod(atoms[:position]), zigzag=True)
                part = part[0] + IN_ZIGZAG, position
                found.append(AxisChoice(None, part, atom // 2, False, (turned,), (), zigzag=True))
    return tuple(found)


def _replicated(rule: Rule) -> AxisChoice:
    return AxisChoice(None, None, 0, False, (Replicate(),) * len(rule.inputs), _everywhere(rule, Replicate()))


def _everywhere(rule: Rule, placement: Placement) -> tuple[Placement | None, ...]:
    return tuple(None if tensor is None else placement for tensor in rule.outputs)


def _split_choice(
    node: fx.Node, rule: Rule, name: str, atoms: tuple[int, ...], position: int, zigzag: bool = False
) -> tuple[tuple[Placement, ...], tuple[Placement | None, ...]] | None:
    """(input placements, output placements) of splitting one atom of a name; None if impossible."""
    one_range = rule.needs_one_range(name)
    if one_range and position > 0:
        return None
    inner = math.prod(atoms[:position])
    shapes = [shape_of(*value_of(operand)) for operand in tensor_operands(node)]
    found = [
        _placement(rule, tensor, name, inner, shape, zigzag)
        for tensor, shape in zip(rule.inputs, shapes, strict=True)
    ]
    outputs: list[Placement | None] = []
    for index, tensor in enumerate(rule.outputs):
        if tensor is None:
            outputs.append(None)
            continue
        placement = _placement(rule, tensor, name, inner, shape_of(node, index), zigzag)
        if isinstance(placement, Replicate):
            if name not in rule.reductions:
                if name not in rule.implementations and name not in rule.synchronised_bytes:
                    return None
            elif rule.reductions[name][index] is not None:
                placement = Partial(str(rule.reductions[name][index]))
        outputs.append(placement)
    everything = [*found, *outputs]
    if one_range and any(isinstance(p, Shard) and p.split > 1 for p in everything):
        return None
    return tuple(found), tuple(outputs)


def _may_be_uneven(
    rule: Rule, name: str, num_atoms: int, placements: Sequence[Placement | None], behind: bool
) -> bool:
    """Whether ranks may hold unequal parts of a name: of one whose only atom is all of its dims; if what is split may
    lie `behind` others, of one that ends its dims."""
    tensors = [*rule.inputs, *(tensor for tensor in rule.outputs if tensor is not None)]
    dims = [dim for tensor in tensors for dim in tensor if name in dim]
    if behind:
        return all(dim[-1] == name for dim in dims)
    one_range = all(not isinstance(placed, Shard) or placed.split == 1 for placed in placements)
    return one_range and num_atoms == 1 and all(len(dim) == 1 for dim in dims)


def _other_lengths(node: fx.Node, rule: Rule, name: str) -> tuple[int, ...]:
    """Of the dims of the name alone that have more or fewer rows than it."""
    shapes = [shape_of(*value_of(operand)) for operand in tensor_operands(node)]
    tensors = [*zip(rule.inputs, shapes, strict=True)]
    tensors += [(tensor, shape_of(node, i)) for i, tensor in enumerate(rule.outputs) if tensor is not None]
    dims = (pair for tensor, shape in tensors for pair in zip(tensor, shape, strict=True))
    return tuple({size: None for factors, size in dims if factors == (name,) and size != rule.sizes[name]})


def _placement(
    rule: Rule, tensor: Tensor, name: str, inner: int, shape: Sequence[int], zigzag: bool
) -> Placement:
    for dim, factors in enumerate(tensor):
        if name in factors:
            sizes = factor_sizes(rule, factors, shape[dim])
            return Shard(dim, math.prod(sizes[: factors.index(name)]) * inner, zigzag)
    return Replicate()

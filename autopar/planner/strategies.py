"""Strategies: every legal way to run one operator on a mesh, from its rule and the atoms of its dims.

Every axis picks one choice: a name of the rule (and an atom of it), a linear pattern ("partial": operands and outputs
stay Partial), or nothing (replicated). The product over the axes, less what does not divide, are the strategies.
Equal operators share one `Strategies` object, so that everything computed from it is computed once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.layout import Layout, Mesh, Partial, Placement, Replicate, Shard, is_legal
from autopar.passes.view_layouts import canonical
from autopar.planner.factorisation import Factorisation, factor_sizes, shape_of, value_of
from autopar.rules.engine import tensor_operands
from autopar.rules.rule import Rule, Tensor

MINIMUM_UNEVEN_BLOCKS = 4
"""An uneven dim is split only when it is at least this many times longer than the axes: padding stays small."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutSet:
    """The layouts that one operand or output takes: distinct ones, and which of them each strategy uses."""

    distinct: tuple[Layout, ...]
    index: NDArray[np.int64]  # (strategies,) into `distinct`

    @staticmethod
    def of(layouts: Sequence[Layout], shape: tuple[int, ...], mesh: Mesh) -> LayoutSet:
        numbers: dict[Layout, int] = {}
        spelled = [canonical(shape, layout, mesh.shape) for layout in layouts]
        index = np.array([numbers.setdefault(layout, len(numbers)) for layout in spelled], dtype=np.int64)
        return LayoutSet(tuple(numbers), index)


@dataclass(frozen=True, slots=True, eq=False)
class Strategies:
    """All strategies of one operator.

    axes[s]: the name that each mesh axis picks ("partial", None). fraction[s]: part of the operator's work that a
    rank does. picks[s]: per axis the name whose implementation or synchronisation applies.
    """

    axes: tuple[tuple[str | None, ...], ...]
    inputs: tuple[LayoutSet, ...]
    outputs: tuple[LayoutSet | None, ...]
    fraction: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.axes)


@dataclass(frozen=True, slots=True)
class Choice:
    """What one axis may pick: placements of all operands and outputs. atom: size of the part that is split (0: none);
    part: identifies the split part, so that several axes on it are counted together."""

    name: str | None
    part: tuple[str, int] | None
    atom: int
    may_be_uneven: bool
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    atom_class: Hashable = None


def choices_of(node: fx.Node, rule: Rule, factorisation: Factorisation) -> list[Choice]:
    """The choices of one axis for an operator: replicated first, then the names, then the linear patterns."""
    found = [_replicated(rule)]
    for name in rule.names:
        atoms = factorisation.name_atoms(node, name, rule.sizes[name])
        for position, atom in enumerate(atoms):
            choice = _split_choice(node, rule, name, atoms, position)
            if choice is not None:
                found.append(
                    Choice(name, (name, position), atom, *choice, factorisation.name_atom_class(node, name, position))
                )
    for pattern in rule.linear:
        inputs = tuple(Partial() if marked else Replicate() for marked in pattern)
        found.append(Choice("partial", None, 0, False, inputs, _everywhere(rule, Partial())))
    return found


def enumerate_strategies(node: fx.Node, choices: Sequence[Sequence[Choice]], mesh: Mesh) -> Strategies | None:
    """The product of the choices of every axis (`choices[axis]`), less what does not divide; None if none is left."""
    combinations = [c for c in itertools.product(*choices) if _fits(c, mesh) and _has_no_empty_block(node, c, mesh)]
    if not combinations:
        return None
    shapes = [shape_of(*value_of(operand)) for operand in tensor_operands(node)]
    outputs = combinations[0][0].outputs
    return Strategies(
        axes=tuple(tuple(choice.name for choice in combination) for combination in combinations),
        inputs=tuple(
            LayoutSet.of([tuple(choice.inputs[i] for choice in c) for c in combinations], shape, mesh)
            for i, shape in enumerate(shapes)
        ),
        outputs=tuple(
            None if placement is None else _output_layouts(node, combinations, o, mesh)
            for o, placement in enumerate(outputs)
        ),
        fraction=np.array([_fraction(combination, mesh) for combination in combinations]),
    )


def local_fraction(layout: Layout, shape: Sequence[int], mesh: Mesh) -> float:
    """Part of a tensor that the fullest rank holds (ceil blocks where a dim does not divide)."""
    fraction = 1.0
    cuts: dict[int, int] = {}
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard):
            cuts[placement.dim] = cuts.get(placement.dim, 1) * mesh.shape[axis]
    for dim, cut in cuts.items():
        fraction *= -(-shape[dim] // cut) / shape[dim]
    return fraction


def shard_choices(value_node: fx.Node, output: int, factorisation: Factorisation) -> list[tuple[Placement, int, bool]]:
    """Placements of one axis for a stored tensor: (Replicate, 0, False), then (Shard, atom size, may be uneven)."""
    found: list[tuple[Placement, int, bool]] = [(Replicate(), 0, False)]
    for dim in range(len(shape_of(value_node, output))):
        atoms = factorisation.atoms((value_node, output), dim)
        for position, atom in enumerate(atoms):
            found.append((Shard(dim, math.prod(atoms[:position])), atom, len(atoms) == 1))
    return found


def divides(atom: int, cut: int, may_be_uneven: bool) -> bool:
    """Whether an atom may be split into `cut` blocks."""
    return atom % cut == 0 or (may_be_uneven and atom >= MINIMUM_UNEVEN_BLOCKS * cut)


def _replicated(rule: Rule) -> Choice:
    return Choice(None, None, 0, False, (Replicate(),) * len(rule.inputs), _everywhere(rule, Replicate()))


def _everywhere(rule: Rule, placement: Placement) -> tuple[Placement | None, ...]:
    return tuple(None if tensor is None else placement for tensor in rule.outputs)


def _split_choice(
    node: fx.Node, rule: Rule, name: str, atoms: tuple[int, ...], position: int
) -> tuple[bool, tuple[Placement, ...], tuple[Placement | None, ...]] | None:
    """(may be uneven, input placements, output placements) of splitting one atom of a name; None if impossible."""
    one_range = rule.needs_one_range(name)
    if one_range and position > 0:
        return None
    inner = math.prod(atoms[:position])
    shapes = [shape_of(*value_of(operand)) for operand in tensor_operands(node)]
    found = [_placement(rule, tensor, name, inner, shape) for tensor, shape in zip(rule.inputs, shapes, strict=True)]
    outputs: list[Placement | None] = []
    for index, tensor in enumerate(rule.outputs):
        if tensor is None:
            outputs.append(None)
            continue
        placement = _placement(rule, tensor, name, inner, shape_of(node, index))
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
    uneven = len(atoms) == 1 and all(not isinstance(p, Shard) or p.split == 1 for p in everything)
    return uneven and _alone(rule, name), tuple(found), tuple(outputs)


def _alone(rule: Rule, name: str) -> bool:
    """Whether the name never shares a dim with another factor."""
    tensors = [*rule.inputs, *(tensor for tensor in rule.outputs if tensor is not None)]
    return all(len(dim) == 1 for tensor in tensors for dim in tensor if name in dim)


def _placement(rule: Rule, tensor: Tensor, name: str, inner: int, shape: Sequence[int]) -> Placement:
    for dim, factors in enumerate(tensor):
        if name in factors:
            sizes = factor_sizes(rule, factors, shape[dim])
            return Shard(dim, math.prod(sizes[: factors.index(name)]) * inner)
    return Replicate()


def _fits(combination: Sequence[Choice], mesh: Mesh) -> bool:
    cuts: dict[tuple[str, int], tuple[Choice, int]] = {}
    for axis, choice in enumerate(combination):
        if choice.part is not None:
            _, cut = cuts.get(choice.part, (choice, 1))
            cuts[choice.part] = (choice, cut * mesh.shape[axis])
    return all(divides(choice.atom, cut, choice.may_be_uneven) for choice, cut in cuts.values())


def _has_no_empty_block(node: fx.Node, combination: Sequence[Choice], mesh: Mesh) -> bool:
    """Whether every rank holds something of every tensor; only uneven splits can leave a rank without."""
    if all(choice.atom % mesh.size == 0 for choice in combination):
        return True
    operands = [(shape_of(*value_of(operand)), i) for i, operand in enumerate(tensor_operands(node))]
    layouts = [(shape, tuple(choice.inputs[i] for choice in combination)) for shape, i in operands]
    for output, placement in enumerate(combination[0].outputs):
        if placement is not None:
            layouts.append((shape_of(node, output), tuple(c.outputs[output] for c in combination)))  # type: ignore[misc]
    return all(is_legal(shape, canonical(shape, layout, mesh.shape), mesh) for shape, layout in layouts)


def _output_layouts(node: fx.Node, combinations: Sequence[Sequence[Choice]], output: int, mesh: Mesh) -> LayoutSet:
    layouts = [tuple(choice.outputs[output] for choice in c) for c in combinations]
    return LayoutSet.of(layouts, shape_of(node, output), mesh)  # type: ignore[arg-type]


def _fraction(combination: Sequence[Choice], mesh: Mesh) -> float:
    cuts: dict[tuple[str, int], tuple[int, int]] = {}
    for axis, choice in enumerate(combination):
        if choice.part is not None:
            atom, cut = cuts.get(choice.part, (choice.atom, 1))
            cuts[choice.part] = (atom, cut * mesh.shape[axis])
    return math.prod(-(-atom // cut) / atom for atom, cut in cuts.values())

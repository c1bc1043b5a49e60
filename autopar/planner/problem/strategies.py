"""Strategies: every legal way to run one operator on a mesh.

Every axis picks one `AxisChoice`: a name of the rule (and an atom of it), a linear pattern ("partial": operands and
outputs stay Partial), or nothing (replicated). The product over the axes, less what does not divide, are the
strategies:

    mm on a (2, 4) mesh:  (m, n)    inputs (S(0), R), (R, S(1))    output (S(0), S(1))    fraction 1/8

The product is a table of choice numbers, one row per strategy and one column per axis; layouts, cuts and fractions are
read off it column by column in numpy, and only distinct layouts become objects.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.layouts.placement import Layout, Mesh, Placement, Shard, is_legal
from autopar.layouts.views import canonical
from autopar.planner.problem.factorisation import shape_of, value_of
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION
from autopar.rules.engine import tensor_operands

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

MINIMUM_UNEVEN_BLOCKS = 4
"""An uneven dim is split only when it is at least this many times longer than the axes: padding stays small."""

MOST_CHANGES = 2
"""How often the choice may change from one axis of a mesh to its neighbour. Up to three axes this leaves everything; on
four, two neighbours choose alike, as on a mesh where they are one axis (other operators may join other neighbours). It
keeps a third of the strategies of a Llama on (2, 4, 8, 8), at most 587 instead of 1,757, and tables have the square."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutSet:
    """The layouts that one operand or output takes: distinct ones, and which of them each strategy uses."""

    distinct: tuple[Layout, ...]
    index: Integers  # (strategies,) into `distinct`

    @staticmethod
    def of(layouts: Sequence[Layout], shape: tuple[int, ...], mesh: Mesh) -> LayoutSet:
        """The layouts of a tensor of this shape, those that mean the same spelled once."""
        numbers: dict[Layout, int] = {}
        spelled = [canonical(shape, layout, mesh.shape) for layout in layouts]
        index = np.array([numbers.setdefault(layout, len(numbers)) for layout in spelled], dtype=np.int64)
        return LayoutSet(tuple(numbers), index)

    def take(self, rows: Integers) -> LayoutSet:
        """The layouts of some of the strategies, distinct ones in the order of their first use."""
        used, first, index = np.unique(self.index[rows], return_index=True, return_inverse=True)
        order = np.argsort(first)
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        return LayoutSet(tuple(self.distinct[used[i]] for i in order), position[index])


@dataclass(frozen=True, slots=True, eq=False)
class Strategies:
    """All strategies of one operator.

    axes[s]: the name that each mesh axis picks ("partial", None). fraction[s]: part of the operator's work that a
    rank does. left_out: how many more there were (`MOST_CHANGES`). implementations[s]: the operator alternative by
    which it runs; (): all as captured.
    """

    axes: tuple[tuple[str | None, ...], ...]
    inputs: tuple[LayoutSet, ...]
    outputs: tuple[LayoutSet | None, ...]
    fraction: NDArray[np.float64]
    left_out: int = 0
    implementations: tuple[str, ...] = ()

    def implementation(self, strategy: int) -> str:
        """By which operator alternative a strategy runs."""
        return self.implementations[strategy] if self.implementations else DEFAULT_IMPLEMENTATION

    def take(self, rows: Integers) -> Strategies:
        """Some of the strategies; layouts keep their numbers."""
        return Strategies(
            axes=tuple(self.axes[row] for row in rows),
            inputs=tuple(LayoutSet(layouts.distinct, layouts.index[rows]) for layouts in self.inputs),
            outputs=tuple(
                None if layouts is None else LayoutSet(layouts.distinct, layouts.index[rows])
                for layouts in self.outputs
            ),
            fraction=self.fraction[rows],
            left_out=self.left_out,
            implementations=tuple(self.implementations[row] for row in rows) if self.implementations else (),
        )

    def __len__(self) -> int:
        return len(self.axes)


IN_ZIGZAG = " in zigzag"


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """What one axis may pick: placements of all operands and outputs. atom: size of the part that is split (0: none);
    part: identifies the split part, so that several axes on it are counted together; zigzag: its blocks are dealt out
    in that order; other_lengths: sizes of the part in tensors that have more or fewer
    rows of it; beside: what the axis splits as well, and its size."""

    name: str | None
    part: tuple[str, int] | None
    atom: int
    may_be_uneven: bool
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    atom_class: Hashable = None
    zigzag: bool = False
    other_lengths: tuple[int, ...] = ()
    beside: tuple[tuple[str, int], int] | None = None

    @property
    def split_part(self) -> tuple[str, int] | None:
        """`part` in whichever order."""
        return None if self.part is None else (self.part[0].removesuffix(IN_ZIGZAG), self.part[1])

    def divides(self, cut: int) -> bool:
        """Whether the part may be split into `cut` blocks, none of which is empty."""
        filled = all(length > -(-length // cut) * (cut - 1) for length in self.other_lengths)
        return filled and divides(self.atom, cut, self.may_be_uneven)

    def pairs(self, cut: int) -> bool:
        """Whether what is split beside the part may be split into `cut` ranges."""
        return self.beside is not None and divides(self.beside[1], cut, may_be_uneven=True)


def enumerate_strategies(node: fx.Node, choices: Sequence[Sequence[AxisChoice]], mesh: Mesh) -> Strategies | None:
    """The product of the choices of every axis (`choices[axis]`), less what does not divide; None if none is left."""
    alternatives, picks, left_out = combinations(choices, mesh)
    if not len(picks):
        return None
    shapes = [shape_of(*value_of(operand)) for operand in tensor_operands(node)]
    inputs = [layouts_of([c.inputs[i] for c in alternatives], picks, shape, mesh) for i, shape in enumerate(shapes)]
    outputs = [
        None if placement is None else layouts_of(_outputs(alternatives, o), picks, shape_of(node, o), mesh)
        for o, placement in enumerate(alternatives[0].outputs)
    ]
    tensors = [*zip(inputs, shapes, strict=True)]
    tensors += [(layouts, shape_of(node, o)) for o, layouts in enumerate(outputs) if layouts is not None]
    rows = np.flatnonzero(_has_no_empty_block(alternatives, picks, tensors, mesh))
    if not len(rows):
        return None
    names = np.array([choice.name for choice in alternatives], dtype=object)
    return Strategies(
        axes=tuple(map(tuple, names[picks[rows]].tolist())),
        inputs=tuple(layouts.take(rows) for layouts in inputs),
        outputs=tuple(None if layouts is None else layouts.take(rows) for layouts in outputs),
        fraction=_fractions(alternatives, picks[rows], mesh),
        left_out=left_out,
    )


def joined(ways: Mapping[str, Strategies]) -> Strategies:
    """The strategies of several implementations of one operator, by their names, one behind the other."""
    if ways.keys() == {DEFAULT_IMPLEMENTATION}:
        return ways[DEFAULT_IMPLEMENTATION]
    parts = list(ways.values())
    return Strategies(
        axes=tuple(axes for part in parts for axes in part.axes),
        inputs=tuple(_joined_layouts(sets) for sets in zip(*(part.inputs for part in parts), strict=True)),
        outputs=tuple(
            None if sets[0] is None else _joined_layouts([one for one in sets if one is not None])
            for sets in zip(*(part.outputs for part in parts), strict=True)
        ),
        fraction=np.concatenate([part.fraction for part in parts]),
        left_out=sum(part.left_out for part in parts),
        implementations=tuple(name for name, part in ways.items() for _ in range(len(part))),
    )


def _joined_layouts(sets: Sequence[LayoutSet]) -> LayoutSet:
    numbers: dict[Layout, int] = {}
    index = []
    for layouts in sets:
        own = np.array([numbers.setdefault(layout, len(numbers)) for layout in layouts.distinct], dtype=np.int64)
        index.append(own[layouts.index])
    return LayoutSet(tuple(numbers), np.concatenate(index))


def combinations(choices: Sequence[Sequence[AxisChoice]], mesh: Mesh) -> tuple[list[AxisChoice], Integers, int]:
    """(distinct choices, (combinations, axes) numbers of choices, how many more `MOST_CHANGES` left out) of what
    divides; the last axis varies fastest."""
    alternatives: list[AxisChoice] = []
    numbers: dict[int, int] = {}  # by identity: the axes share the choices of one operator
    columns = []
    for options in choices:
        for choice in options:
            if id(choice) not in numbers:
                numbers[id(choice)] = len(alternatives)
                alternatives.append(choice)
        columns.append([numbers[id(choice)] for choice in options])
    picks = np.stack([grid.ravel() for grid in np.meshgrid(*columns, indexing="ij")], axis=1)
    picks = picks[_fits(alternatives, picks, mesh) & _in_one_order(alternatives, picks)]
    few = np.count_nonzero(np.diff(picks, axis=1), axis=1) <= MOST_CHANGES
    if few.all() or not few.any():  # named axes may ask for four different choices: then these are all there are
        return alternatives, picks, 0
    return alternatives, picks[few], len(picks) - int(few.sum())


def layouts_of(placements: Sequence[Placement], picks: Integers, shape: tuple[int, ...], mesh: Mesh) -> LayoutSet:
    """The layouts of one tensor: row r places it on axis a as `placements[picks[r, a]]`."""
    numbers: dict[Placement, int] = {}
    number = np.array([numbers.setdefault(placement, len(numbers)) for placement in placements], dtype=np.int64)
    named = list(numbers)
    _, first, inverse = np.unique(
        number[picks] @ (len(named) ** np.arange(picks.shape[1])), return_index=True, return_inverse=True
    )
    distinct = [tuple([named[code] for code in codes]) for codes in number[picks[first]].tolist()]
    layouts = LayoutSet.of(distinct, shape, mesh)
    return LayoutSet(layouts.distinct, layouts.index[inverse]).take(np.arange(len(picks)))


def local_fraction(layout: Layout, shape: Sequence[int], mesh: Mesh) -> float:
    """Part of a tensor that the fullest rank holds (ceil blocks where a dim does not divide)."""
    fraction = 1.0
    cuts: dict[int, dict[int, int]] = {}
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard):
            of_dim = cuts.setdefault(placement.dim, {})
            of_dim[placement.split] = of_dim.get(placement.split, 1) * mesh.shape[axis]
    for dim, of_dim in cuts.items():
        last, size = max(of_dim), shape[dim]
        inner = of_dim.pop(last)
        fraction *= last * -(-size // (last * inner)) / size / math.prod(of_dim.values())
    return fraction


def divides(atom: int, cut: int, may_be_uneven: bool) -> bool:
    """Whether an atom may be split into `cut` blocks."""
    return atom % cut == 0 or (may_be_uneven and atom >= MINIMUM_UNEVEN_BLOCKS * cut)


def _cuts(alternatives: Sequence[AxisChoice], picks: Integers, mesh: Mesh) -> list[tuple[AxisChoice, Integers]]:
    """Per part that is split: a choice of it, and into how many blocks every combination cuts it."""
    parts: dict[tuple[str, int], AxisChoice] = {c.part: c for c in alternatives if c.part is not None}
    sizes = np.array(mesh.shape, dtype=np.int64)
    found = []
    for part, choice in parts.items():
        takes = np.array([c.part == part for c in alternatives])
        found.append((choice, np.where(takes[picks], sizes, 1).prod(axis=1)))
    return found


def _fits(alternatives: Sequence[AxisChoice], picks: Integers, mesh: Mesh) -> Flags:
    fits = np.ones(len(picks), dtype=bool)
    for choice, cut in _cuts(alternatives, picks, mesh):
        allowed = {int(size): choice.divides(int(size)) for size in np.unique(cut)}
        fits &= np.array([allowed[int(size)] for size in cut])
    for part, size in {choice.beside: None for choice in alternatives if choice.beside is not None}:
        fits &= _ranges_fit(alternatives, picks, part, size, mesh)
    return fits


def _ranges_fit(
    alternatives: Sequence[AxisChoice], picks: Integers, part: tuple[str, int], size: int, mesh: Mesh
) -> Flags:
    """Whether what pairs split beside their rows leaves no rank without, in unequal ranges over one axis at most; and
    no axis behind them splits it alone, so that the ranks of a group hold neighbouring ranges."""
    takes = np.array([part in (c.part, None if c.beside is None else c.beside[0]) for c in alternatives])[picks]
    in_pairs = np.array([choice.beside is not None for choice in alternatives])[picks]
    paired, begun = in_pairs.any(axis=1), np.logical_or.accumulate(in_pairs, axis=1)
    cuts = np.where(takes, np.array(mesh.shape, dtype=np.int64), 1).prod(axis=1)
    fits: Flags = ~paired | (size % cuts == 0)
    fits |= (takes.sum(axis=1) == 1) & (size >= MINIMUM_UNEVEN_BLOCKS * cuts)
    fits &= ~(begun & takes & ~in_pairs).any(axis=1)
    return fits


def _in_one_order(alternatives: Sequence[AxisChoice], picks: Integers) -> Flags:
    """Whether no part is split in zigzag order over one axis and plainly over another."""
    fits = np.ones(len(picks), dtype=bool)
    for part in {choice.split_part for choice in alternatives if choice.zigzag}:
        of_part = [choice.split_part == part for choice in alternatives]
        orders = [
            np.array([taken and choice.zigzag == order for taken, choice in zip(of_part, alternatives, strict=True)])
            for order in (False, True)
        ]
        fits &= ~(orders[0][picks].any(axis=1) & orders[1][picks].any(axis=1))
    return fits


def _has_no_empty_block(
    alternatives: Sequence[AxisChoice],
    picks: Integers,
    tensors: Sequence[tuple[LayoutSet, tuple[int, ...]]],
    mesh: Mesh,
) -> Flags:
    """Whether every rank holds something of every tensor; only uneven splits can leave a rank without."""
    uneven = np.zeros(len(picks), dtype=bool)
    for choice, cut in _cuts(alternatives, picks, mesh):
        uneven |= (choice.atom % cut != 0) | (bool(choice.other_lengths) & (cut > 1))
    legal = np.ones(len(picks), dtype=bool)
    for layouts, shape in tensors:
        for number in np.unique(layouts.index[uneven]):
            if not is_legal(shape, layouts.distinct[number], mesh):
                legal &= ~uneven | (layouts.index != number)
    return legal


def _outputs(alternatives: Sequence[AxisChoice], output: int) -> list[Placement]:
    found = [choice.outputs[output] for choice in alternatives]
    return [placement for placement in found if placement is not None]


def _fractions(alternatives: Sequence[AxisChoice], picks: Integers, mesh: Mesh) -> NDArray[np.float64]:
    fraction = np.ones(len(picks))
    for choice, cut in _cuts(alternatives, picks, mesh):
        fraction *= -(-choice.atom // cut) / choice.atom
    return fraction

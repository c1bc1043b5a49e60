"""Skeleton: the decisions of a program and who reads what, before any mesh is known.

One slot per operator, parameter, batch input, constant and differentiable output, and one *shared copy* per tensor and
phase with several consumers, so that a gather that q, k and v share is paid once. A link says with which slot another
one finds its operand; views fold away into the link.

    x -> norm -> (q, k, v)      slots x, norm, copy of norm, q, k, v      links norm -> copy, copy -> q, copy -> k, ...

Every mesh and every price list fills the same skeleton (`build.py`). Slots of repeated layers are of one `equivalence`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import fx

from autopar.planner.problem.equivalence import Equivalence, TensorEquivalence
from autopar.planner.problem.factorisation import Value
from autopar.program import Program
from autopar.rules.rule import Rule

SlotKind: TypeAlias = Literal["operator", "parameter", "data", "copy"]


@dataclass(frozen=True, slots=True)
class SlotLink:
    """`target` finds operand `port` with output `output` of `source`, behind views. tensor, views: numbers into the
    skeleton's lists. The one port of a parameter is its stored layout, that of data and copies their layout."""

    source: int
    output: int
    target: int
    port: int
    tensor: int
    views: int


@dataclass(slots=True, eq=False)
class Slot:
    """One decision. equivalence: number into `Skeleton.equivalences`, -1 for a copy. tolls: (output, tensor) of what
    must be replicated in the end, which the slot pays itself."""

    kind: SlotKind
    name: str
    node: fx.Node
    equivalence: int
    phase: str = "forward"
    tolls: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """Slots and links of a program in schedule order, and what they are.

    copies_of: slot of a copy -> the link into it, and the links out of it, in program order. rules, uncovered, heavy:
    operators with a rule, without one, and with FLOPs worth splitting. sequences: samples times heads of keys, which
    attention may split without cutting a sequence. operators, placeholders, outputs (index into `program.outputs`),
    copies: where to find a slot.
    """

    program: Program
    slots: list[Slot]
    links: list[SlotLink]
    copies_of: dict[int, tuple[SlotLink, list[SlotLink]]]
    equivalences: list[Equivalence]
    tensors: list[TensorEquivalence]
    views: list[tuple[fx.Node, ...]]
    batch: Hashable
    sequence: Hashable
    sequences: int
    operators: dict[fx.Node, int]
    placeholders: dict[fx.Node, int]
    outputs: dict[int, int]
    copies: dict[tuple[Value, str], int]
    rules: Mapping[fx.Node, Rule]
    uncovered: list[fx.Node]
    heavy: set[fx.Node]

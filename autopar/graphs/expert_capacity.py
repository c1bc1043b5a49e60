"""Capacity: how many rows a rank sends to each expert at most, where `ep="capacity"` was asked with a factor.

    places_per_expert(rows=32, experts=8, factor=1.25)      5: a quarter more than an even share, rounded up

Rows are those of a rank in one call (of a micro-batch), experts all of the layer, whoever holds them. The factor
changes what a run computes: rows beyond the places are dropped (`ops/capped_rows.py`).
"""

from __future__ import annotations

import math
from fractions import Fraction

from torch import fx

from autopar.graphs.expert_loads import AnyProgram, with_said_of_experts

CAPACITY = "expert_capacity"
"""Key in the meta of a product of experts: the factor."""


def places_per_expert(rows: int, experts: int, factor: float) -> int:
    """Rows that a rank with `rows` of them sends to each expert: `factor` times an even share, rounded up, and no more
    than it has. The factor is the decimal number that it is written as: 1.1 of 10 are 11."""
    return min(rows, math.ceil(Fraction(str(factor)) * rows / experts))


def with_expert_capacity(program: AnyProgram, factor: float | None) -> AnyProgram:
    """The program whose products of experts carry the factor; the program itself without one."""
    return program if factor is None else with_said_of_experts(program, lambda node: {CAPACITY: factor})


def capacity_of(node: fx.Node) -> float | None:
    """The factor that a product of experts carries."""
    factor: float | None = node.meta.get(CAPACITY)
    return factor

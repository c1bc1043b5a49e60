"""The lowered program of one rank, forward and backward in one graph, as tests of single passes take it."""

from __future__ import annotations

from autopar.passes.lowering.chain import join_kernels, lowered_step
from autopar.plans.parallel_plan import Plan
from autopar.program import Program


def lower(program: Program, plan: Plan, rank: int = 0) -> Program:
    """`lowered_step` before it is split; of a plan without stages."""
    return lowered_step(program, plan, rank, until=join_kernels).only.program

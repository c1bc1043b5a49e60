"""Binding: the limits that a plan runs into. A limit binds where the plan would cost less without it.

    memory 79.2 GiB at backward 3 (layers.2.mlp/mm#1/bwd)      solved again as if memory were free
    constraint 'lm_head.weight': R on every axis               solved again without this constraint
    axes named dp_shard, tp                                    solved again with free names on the same mesh

Each is tried by itself, and only what lowers the objective is named, with the gain and with what the explained choice
would then be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.errors import InfeasibleError, PlanMismatchError
from autopar.explain.answers import OPTIMUM_ROUNDING, Binding
from autopar.explain.memory_pieces import loss_operators, moment_of
from autopar.explain.recovered import query_of
from autopar.explain.source import Source
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.read_solution import describe
from autopar.planner.one_mesh.recovered_problem import recover
from autopar.planner.one_mesh.restrict import ImpossiblePlacement
from autopar.planner.one_mesh.solved_again import Resolved, Resolver
from autopar.planner.one_mesh.within_memory import MEMORY_GAP
from autopar.plans.next_gib import GIB, NextGib, next_gib_of
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes
from autopar.request import Request
from autopar.request.mesh_axes import FREE_AXIS_NAMES


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """A limit that was taken away, and the best plan without it."""

    constraint: str
    best: Resolved
    mesh: Mesh
    gain_seconds: float


class BindingLimits:
    """The limits that bind one plan, each tried once."""

    def __init__(self, source: Source, plan: Plan, resolver: Resolver) -> None:
        self.source, self.plan, self.resolver = source, plan, resolver

    def of(self, index: int) -> tuple[Binding, ...]:
        """The limits that bind the plan, with what they make of decision `index`."""
        recovered = self.resolver.recovered
        chosen = describe(recovered.built.variables[index], int(recovered.labels[index]), recovered.mesh)
        found = []
        for relaxed in self.binding:
            then = describe(relaxed.best.built.variables[index], int(relaxed.best.labels[index]), relaxed.mesh)
            found.append(
                Binding(
                    constraint=relaxed.constraint,
                    gain_seconds=relaxed.gain_seconds,
                    instead=None if then == chosen else then,
                )
            )
        return tuple(found)

    @cached_property
    def binding(self) -> list[Relaxed]:
        """Every limit without which the plan would cost less."""
        return [relaxed for relaxed in self._all if relaxed.gain_seconds > 0.0]

    @property
    def tried(self) -> tuple[tuple[str, float], ...]:
        """(limit, seconds per step that the plan would cost less without it) of every limit that was taken away."""
        return tuple((relaxed.constraint, relaxed.gain_seconds) for relaxed in self._all)

    @cached_property
    def next_gib(self) -> NextGib | None:
        """What one more GiB of memory would buy, solved again beside what the plan says of it; None where the limit
        does not bind."""
        if not self._all[0].gain_seconds:
            return None
        said = next_gib_of(self.plan) or NextGib()
        try:
            gain = self._relaxed("", self.resolver.with_more(GIB), self.plan.mesh).gain_seconds
        except InfeasibleError:
            return said  # the rows of the plan's own moments leave no answer that was found in time
        return replace(said, found_seconds=gain)

    @cached_property
    def _all(self) -> list[Relaxed]:
        return list(self._tried())

    def _tried(self) -> Iterator[Relaxed]:
        yield from self._memory()
        request = self.source.request
        for text, others in _without_one(request.constraints):
            yield from self._without(f"constraint {text}", replace(request, constraints=others), self.plan.mesh)
        if request.recompute is not None:
            yield from self._without(f"recompute={request.recompute}", replace(request, recompute=None), self.plan.mesh)
        mesh, free = self.plan.mesh, _free_names(self.plan.mesh)
        if request.dims and mesh != free:
            said = f"axes named {', '.join(mesh.axis_names)}"
            unnamed = replace(request, dims=None, cp=None, ep=None, replicated_experts=None, expert_capacity=None)
            yield from self._without(said, unnamed, free)

    def _memory(self) -> Iterator[Relaxed]:
        best = self.resolver.without_limit()
        recovered = self.resolver.recovered
        moment = self._moment()
        limit = format_bytes(recovered.query.budget_bytes)
        holds = format_bytes(float(self.resolver.over_time.max()))
        yield self._relaxed(f"memory limit {limit} (the plan holds {holds} at {moment})", best, recovered.mesh)

    def _moment(self) -> str:
        """The fullest moment of the plan in words."""
        lifetimes, fullest = self.resolver.recovered.lifetimes, self.resolver.fullest
        if fullest == lifetimes.end:
            return "the optimizer's step"
        return moment_of(lifetimes.in_order, fullest, loss_operators(lifetimes.in_order))

    def _without(self, text: str, request: Request, mesh: Mesh) -> Iterator[Relaxed]:
        """The best plan on a mesh of the same sizes for a question without a constraint, from this plan on."""
        try:
            recovered = recover(query_of(self.source, self.plan, request), replace(self.plan, mesh=mesh))
            resolver = Resolver(recovered, self.resolver.cpu_seconds, self.resolver.memory_gap)
            yield self._relaxed(text, resolver.optimum(), mesh)
        except (InfeasibleError, PlanMismatchError, ImpossiblePlacement):
            return  # the plan itself is no answer there, so nothing can be said

    def _relaxed(self, text: str, best: Resolved, mesh: Mesh) -> Relaxed:
        objective = self.resolver.recovered.objective
        rounding = (MEMORY_GAP if best.rows else OPTIMUM_ROUNDING) * objective
        gain = objective - best.objective
        return Relaxed(text, best, mesh, gain if gain > rounding else 0.0)


def _without_one(constraints: object) -> Iterator[tuple[str, object]]:
    """(a constraint in words, the others), for every constraint of `constraints=`."""
    if isinstance(constraints, str):
        yield constraints, None
    elif isinstance(constraints, dict):
        for pattern, value in constraints.items():
            yield f"{pattern!r}: {value}", {key: other for key, other in constraints.items() if key != pattern} or None


def _free_names(mesh: Mesh) -> Mesh:
    return Mesh(FREE_AXIS_NAMES[len(mesh.shape)], mesh.shape)

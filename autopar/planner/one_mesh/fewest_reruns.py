"""Fewest reruns: a plan that runs again what its segments allow, beside the least that its step could (`reruns.py`).

    search = FewestReruns.of(query, plain, lifetimes, plan, labels)     None where the step is too large to ask
    search.learn(plan, measured)                                        what moments hold beside values
    built, solution, lifetimes = search.solve(bound)                    the same layouts, other reruns

The layouts stay those of a plan that is known. The answer is one assignment of the problem in which the segments that
it needs are joined, so that explanations and edits read it as any other plan; its lowered program says whether it fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autopar.later import later
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.lowered_bytes import transient_bytes
from autopar.planner.memory.nested_spans import given_up_by
from autopar.planner.memory.recomputation import (
    DROPPED,
    RECOMPUTED,
    SAVED,
    expand,
    is_made_anywhere,
    repeatable,
    with_states,
)
from autopar.planner.memory.reruns import Reruns, Step, held_over_time, runs_of
from autopar.planner.memory.spans import spans_in
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.warm_start import Rows
from autopar.planner.one_mesh.within_memory import local_bytes
from autopar.planner.problem.build import Built
from autopar.planner.problem.constraint_targets import recompute_of
from autopar.planner.problem.factorisation import Value
from autopar.planner.problem.graph_operators import base_of
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.prices import Floats
from autopar.planner.solver import Solution, evaluate, is_forbidden, solution_of
from autopar.plans.parallel_plan import Plan
from autopar.rules.engine import tensor_operands

fewest_reruns: Callable[..., Reruns | None] = later("autopar.planner.memory.rerun_program", "fewest_reruns")


@dataclass(slots=True)
class FewestReruns:
    """The question for one plan. labels: of the plain problem; names: of the operators of a step, in its order."""

    query: Query
    plain: Built
    lifetimes: Lifetimes
    labels: Rows
    step: Step
    names: list[str]
    beyond: Floats
    hint: Reruns = field(default_factory=lambda: Reruns({}))

    @staticmethod
    def of(query: Query, plain: Built, lifetimes: Lifetimes, plan: Plan, labels: Rows) -> FewestReruns | None:
        """None where the mode does not ask, there are too many operators, or something else was asked of recomputation.
        labels: of the plain problem, or of one that `expand` made of it."""
        if not query.search.reruns_time:
            return None
        forward = sum(node.meta["phase"] != "backward" for node in lifetimes.in_order)
        too_many = forward > LIMITS.most_operators_of_reruns or forward == len(lifetimes.in_order)
        if too_many or query.may_wait_on_host or query.recompute in ("none", "full") or query.constraints.recompute:
            return None
        sizes = np.array([len(variable.costs) for variable in plain.variables])
        step = step_of(query, plain, plan, lifetimes, labels % sizes)
        names = [str(node.meta["operator"]) for node in lifetimes.in_order]
        return FewestReruns(query, plain, lifetimes, labels % sizes, step, names, np.zeros(len(names)))

    def learn(self, plan: Plan, measured: Floats) -> None:
        """Take what every operator of a lowered plan holds beside the values of its step."""
        number = {name: index for index, name in enumerate(self.names)}
        self.hint = Reruns({
            number[name]: tuple(sorted(number[moment] for moment in plan.operators[name].recompute_at))
            for name in plan.recomputed
        })  # fmt: skip
        held = held_over_time(self.step, runs_of(self.step, self.hint))
        self.beyond = transient_bytes(measured[:-1], held)

    def solve(self, lower_bound: float) -> tuple[Built, Solution, Lifetimes] | None:
        """The problem in which the answer is one assignment; None where none was found but what was learnt last.
        lower_bound: what no plan of the mesh is under."""
        search, room = self.query.search, self.query.budget_bytes - self.beyond
        limit, seconds = search.reruns_time / search.memory_rounds, self.query.deadline.left()
        found = fewest_reruns(self.step, room, limit, self.hint, seconds)
        return None if found is None or found.anew == self.hint.anew else self._read(found, lower_bound)

    def _read(self, found: Reruns, lower_bound: float) -> tuple[Built, Solution, Lifetimes] | None:
        moments = {self.names[k]: [self.names[late] for late in lates] for k, lates in found.anew.items()}
        spans = spans_in(self.lifetimes, moments)
        lifetimes = self.lifetimes.joined(spans, given_up_by(self.lifetimes, moments), repeats_last=True)
        asked = recompute_of(self.query.program, self.query.constraints)
        built = expand(self.plain, lifetimes, self.query.recompute, asked)
        labels = self._labels(built, lifetimes, set(moments))
        if is_forbidden(np.asarray(evaluate(built.problem, labels)[0])):
            return None
        return built, solution_of(built.problem, labels, lower_bound), lifetimes

    def _labels(self, built: Built, lifetimes: Lifetimes, again: set[str]) -> Rows:
        """What runs again, what that or backward reads saved, and nothing else."""
        saved = with_states(self.plain, built, self.labels, (SAVED, DROPPED, RECOMPUTED))
        dropped = with_states(self.plain, built, self.labels, (DROPPED, SAVED, RECOMPUTED))
        made = with_states(self.plain, built, self.labels, (RECOMPUTED, SAVED, DROPPED))
        found = dropped.copy()
        for node, index in built.operators.items():
            if str(node.meta["operator"]) in again:
                found[index] = made[index]
            elif any(_names(lifetimes, (node, output)) & again for output in lifetimes.saved_outputs(node)):
                found[index] = saved[index]
        for (value, _), index in built.copies.items():
            if _names(lifetimes, value) & again:
                found[index] = made[index]
        return found


def _names(lifetimes: Lifetimes, value: Value) -> set[str]:
    """Of the operators of forward that read a value."""
    return {str(reader.meta["operator"]) for reader in lifetimes.forward_readers.get(value, ())}


def step_of(query: Query, plain: Built, plan: Plan, lifetimes: Lifetimes, labels: Rows) -> Step:
    """The step of a plan on its fullest rank, at the prices of its problem; labels: of the plain one."""
    nodes = lifetimes.in_order
    read = [list(dict.fromkeys(buffer_of(operand) for operand in tensor_operands(node))) for node in nodes]
    results = [buffer_of(node) for node in query.program.returned if isinstance(node, fx.Node)]
    position = lifetimes.position
    values = sorted(
        {value for each in (*read, results) for value in each if value[0] in position},
        key=lambda value: (position[value[0]], value[1]),
    )
    number = {value: index for index, value in enumerate(values)}
    may_repeat = repeatable(plain, query.recompute, recompute_of(query.program, query.constraints))
    forward = [node for node in nodes if node.meta["phase"] != "backward"]
    returned = frozenset(number[value] for value in results if value in number)
    anywhere = frozenset(position[node] for node in forward if is_made_anywhere(node))
    kept = {position[values[value][0]] for value in returned}
    return Step(
        seconds=_seconds(plain, nodes, labels),
        reads=[[number[value] for value in each if value in number] for each in read],
        makers=[position[node] for node, _ in values],
        value_bytes=[local_bytes(plain, plan.mesh, labels, value) for value in values],
        forward=len(forward),
        repeatable=frozenset(position[node] for node in forward if may_repeat(node)) - anywhere - kept,
        anywhere=anywhere - kept,
        returned=returned,
    )


def _seconds(plain: Built, nodes: list[fx.Node], labels: Rows) -> list[float]:
    """Of every operator, with the redistributions of what it reads of others."""
    chosen, found = labels.tolist(), dict[int, float]()
    for edge in plain.problem.edges:
        if plain.variables[edge.source].kind != "parameter":
            cost = float(edge.costs[chosen[edge.source], chosen[edge.target]])
            found[edge.target] = found.get(edge.target, 0.0) + cost
    indices = [plain.operators[node] for node in nodes]
    return [float(plain.variables[i].costs[chosen[i]]) + found.get(i, 0.0) for i in indices]


def buffer_of(node: fx.Node) -> Value:
    """The value whose memory a node shows."""
    value, _ = base_of(node)
    while getattr(value[0].target, "is_view", False):
        value, _ = base_of(value[0].all_input_nodes[0])
    return value

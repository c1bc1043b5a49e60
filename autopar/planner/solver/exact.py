"""The exact stack for a problem without budgets: reduce, bound, fix, repeat; then eliminate or branch.

One round (`_Search.round`):
  1. `reductions.simplify`; if nothing is left, the constant is the optimum;
  2. bucket elimination, if its tables are small (`bucket_elimination`): before the first sweep smaller than later;
  3. dual ascent: messages give a lower bound, roundings give assignments (`_ascend`);
  4. recombination: the best mix of labels seen in recent assignments, exactly, by 1. and 2. (`_recombine`);
  5. remove every label whose bound exceeds the best objective (`_fix`), and start again with what is left: as soon as
     few survive.
When rounds stop helping, HiGHS finishes (`_branch`). Each step is logged for the certificate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planner.solver import mip
from autopar.planner.solver.bucket_elimination import eliminate_all, elimination_order
from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.dual_ascent import Core, DualAscent, LabelBounds, class_ranks, schedule_ranks
from autopar.planner.solver.labelling import Floats, Integers
from autopar.planner.solver.lifting import lift
from autopar.planner.solver.reductions import Graph, back_substitute, simplify
from autopar.planner.solver.solution import Fix, Step, Warmth
from autopar.planner.solver.warm_messages import load, save

MAX_ROUNDS = 14
FIRST_ENTRIES = 30_000_000
"""Of all tables together, up to which bucket elimination comes before the first sweep: it takes about as long as the
sweeps that it spares. GPT-2 on one axis of eight: 0.8 million entries in 0.02 CPU s, where forty sweeps take 1.1."""
SWEEPS_PER_LOOK = 10
"""Sweeps (forward and backward) between two looks at bound and rounding."""
LOOKS_PER_ROUND, FEW_SURVIVE = 4, 0.6
"""A round ends after so many looks, or once its bounds leave this part of the labels."""
FIRST_SWEEPS = 4
"""Sweeps before the first look where good messages were known."""
SCHEDULE_ORDER_NODES = 2_500
"""Up to this size sweeps follow the schedule (fewer sweeps), above they batch repeated nodes (cheaper)."""
PEAK_ENTRIES, TOTAL_ENTRIES = 20_000_000, 400_000_000
RECOMBINE_PEAK_ENTRIES, RECOMBINE_TOTAL_ENTRIES = 3_000_000, 200_000_000
BRANCH_LABELS, BRANCH_ROUNDS, STALLED = 8_000, 5, 0.8
"""HiGHS takes over below this many labels, after this many rounds, once a round keeps this part of them."""
MAX_BRANCH_LABELS, BRANCH_SECONDS = 15_000, 600.0
"""HiGHS is not started above this many labels: it would find nothing in minutes."""
POOL = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`bound` is proven by `steps` on the graph's original problem and then `messages` on what they leave."""

    bound: float
    steps: tuple[Step, ...]
    messages: Floats
    eliminated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOutcome:
    """The best assignment (original labels), bounds in seconds with their proof, assignments met, and messages."""

    assignment: Integers
    objective: float
    bound: float
    proof: Proof
    method: str
    rounds: int
    pool: list[Integers]
    warmth: Warmth
    sweeps: int


def solve_graph(
    graph: Graph,
    *,
    gap: float,
    deadline: Deadline,
    warmth: Warmth | None = None,
    pool: Sequence[Integers] = (),
    stop_above: float = np.inf,
) -> ExactOutcome:
    """Minimise `graph` (which is consumed).

    Stops at relative `gap`, at the deadline, or with a bound above `stop_above`, always with an assignment and a bound.
    """
    search = _Search(graph, gap, deadline, warmth or {}, pool, stop_above)
    simplify(graph)
    while not search.finished():
        search.round()
    return search.outcome()


def core_of(graph: Graph) -> tuple[Core, list[int]]:
    """Return what is left of `graph` as a core, and the graph's node of each of its nodes."""
    nodes = graph.nodes()
    position = {node: index for index, node in enumerate(nodes)}
    edges = tuple((position[u], position[v], matrix) for u, v, matrix in graph.edges())
    return Core(arena=graph.arena, costs=tuple(graph.costs[node] for node in nodes), edges=edges), nodes


def start_ascent(core: Core) -> DualAscent:
    """Return a dual ascent whose order suits the size of the core."""
    ranks = schedule_ranks(core) if len(core.costs) <= SCHEDULE_ORDER_NODES else class_ranks(core)
    return DualAscent(core, ranks)


class _Search:
    """The state of one solve: the shrinking graph, the best assignment, the best bound and its proof."""

    def __init__(
        self,
        graph: Graph,
        gap: float,
        deadline: Deadline,
        warmth: Warmth,
        pool: Sequence[Integers],
        stop_above: float,
    ) -> None:
        self.original = graph.copy()
        self.stop_above = stop_above
        self.graph, self.gap, self.deadline, self.warmth = graph, gap, deadline, warmth
        self.first_messages: Warmth = {}
        self.pool: list[Integers] = []
        self.objective, self.bound = np.inf, -np.inf
        self.assignment: Integers | None = None
        self.proof = Proof(bound=-np.inf, steps=(), messages=np.zeros(0), eliminated=False)
        self.method, self.rounds, self.sweeps = "messages", 0, 0
        self.labels = graph.num_labels()
        self.exhausted = False
        for labels in pool:
            self._offer(labels)

    def finished(self) -> bool:
        found = self.assignment is not None
        enough = self.objective - self.bound <= self.gap * abs(self.objective) or self.bound > self.stop_above
        return self.exhausted or (found and enough)

    def round(self) -> None:
        """Close the problem or make it smaller."""
        nodes = self.graph.nodes()
        if not nodes:
            self._close("reductions")
            return
        order = elimination_order(self.graph, PEAK_ENTRIES, TOTAL_ENTRIES if self.rounds else FIRST_ENTRIES)
        if order is not None:
            eliminate_all(self.graph, order)
            self._close("bucket elimination")
            return
        before, self.labels = self.labels, self.graph.num_labels()
        stalled = self.labels < BRANCH_LABELS and self.labels > STALLED * before
        if self.rounds >= MAX_ROUNDS or (self.rounds >= BRANCH_ROUNDS and stalled):
            self._branch()
            return
        ascent, nodes = self._ascend()
        self.rounds += 1
        if self.finished() or self.deadline.left() <= 0.0:
            self.exhausted = True
            return
        self._recombine()
        if not self.finished():
            self._fix(ascent, nodes)

    def outcome(self) -> ExactOutcome:
        if self.assignment is None:
            raise AssertionError("a search ends with an assignment")
        return ExactOutcome(
            assignment=self.assignment,
            objective=self.objective,
            bound=min(self.bound, self.objective),
            proof=self.proof,
            method=self.method,
            rounds=self.rounds,
            pool=self.pool,
            warmth=self.first_messages,
            sweeps=self.sweeps,
        )

    def _offer(self, labels: Integers) -> None:
        """Take an assignment of original labels into the pool, and as the best if it is."""
        value = value_of(self.original, labels)
        if value < self.objective:
            self.objective, self.assignment = value, labels
        if np.isfinite(value):
            self.pool = [*self.pool, labels][-POOL:]

    def _close(self, method: str) -> None:
        """Take the optimum of a graph in which nothing is left."""
        self._offer(back_substitute(self.graph, {}))
        self.method, self.exhausted = method, True
        self._prove(self.graph.constant, np.zeros(0), eliminated=True)

    def _prove(self, bound: float, messages: Floats, *, eliminated: bool) -> None:
        """Keep this bound and its proof if it is better. Labels fixed earlier only promise their cutoff."""
        cutoffs = [step.cutoff for step in self.graph.steps if isinstance(step, Fix)]
        bound = min([bound, *cutoffs])
        if bound > self.bound:
            self.bound = bound
            self.proof = Proof(bound=bound, steps=tuple(self.graph.steps), messages=messages, eliminated=eliminated)

    def _ascend(self) -> tuple[DualAscent, list[int]]:
        core, nodes = core_of(self.graph)
        ascent = self._start(core, nodes)
        started_warm = self.rounds == 0 and bool(ascent.messages.any())
        for look in range(0 if self.finished() else LOOKS_PER_ROUND):
            for _ in range(FIRST_SWEEPS if started_warm and not look else SWEEPS_PER_LOOK):
                ascent.sweep(True)
                ascent.sweep(False)
                self.sweeps += 1
                if self.deadline.left() <= 0.0:
                    break
            bounds = self._look(ascent, nodes)
            if self.finished() or self.deadline.left() <= 0.0:
                break
            if np.count_nonzero(self._survives(bounds)) <= FEW_SURVIVE * bounds.slack.size:
                break
        self.warmth = save(ascent, nodes, self.graph)
        self.first_messages = self.first_messages or self.warmth
        return ascent, nodes

    def _start(self, core: Core, nodes: list[int]) -> DualAscent:
        """Return an ascent that starts from known messages, else from those of a short copy, else from none."""
        lifted = (
            None
            if self.warmth
            else lift(core, gap=self.gap, deadline=self.deadline, stop_above=self.stop_above - self.graph.constant)
        )
        if lifted is not None:
            self.sweeps += lifted.sweeps
            self._offer_positions(lifted.labels, nodes)
            if lifted.proof is not None:
                bound = lifted.ascent.label_bounds(lifted.proof).bound
                self._prove(self.graph.constant + bound, lifted.proof, eliminated=False)
            return lifted.ascent
        ascent = start_ascent(core)
        load(ascent, nodes, self.graph, self.warmth)
        return ascent

    def _offer_positions(self, chosen: Integers, nodes: list[int]) -> None:
        """Offer label positions of the living nodes."""
        domains = self.graph.domains
        labels = {node: int(domains[node][label]) for node, label in zip(nodes, chosen.tolist(), strict=True)}
        self._offer(back_substitute(self.graph, labels))

    def _look(self, ascent: DualAscent, nodes: list[int]) -> LabelBounds:
        self._offer_positions(ascent.improve(ascent.round_backward_messages()), nodes)
        messages = ascent.shared_messages()
        bounds = ascent.label_bounds(messages)
        self._prove(self.graph.constant + bounds.bound, messages, eliminated=False)
        return bounds

    def _survives(self, bounds: LabelBounds) -> NDArray[np.bool_]:
        """Per label of the core: whether it may be in a better assignment than the best one."""
        # A margin of rounding size: a label that ties with the best assignment must survive.
        cutoff = self.objective
        return bounds.slack <= cutoff - self.graph.constant - bounds.bound + 1e-10 * abs(cutoff)

    def _recombine(self) -> None:
        """Solve exactly with only the labels of the pool. A restriction: it can only find assignments."""
        trial = self.graph.copy()
        seen = np.stack(self.pool)
        for node in trial.nodes():
            kept = np.flatnonzero(np.isin(trial.domains[node], seen[:, node]))
            if 0 < len(kept) < trial.size(node):
                trial.restrict(node, kept)
        simplify(trial)
        if trial.nodes():
            order = elimination_order(trial, RECOMBINE_PEAK_ENTRIES, RECOMBINE_TOTAL_ENTRIES)
            if order is None:
                return
            eliminate_all(trial, order)
        self._offer(back_substitute(trial, {}))

    def _fix(self, ascent: DualAscent, nodes: list[int]) -> None:
        messages = ascent.shared_messages()
        survives = self._survives(ascent.label_bounds(messages))
        kept: dict[int, Integers] = {}
        for index, node in enumerate(nodes):
            positions = np.flatnonzero(survives[ascent.starts[index] : ascent.starts[index + 1]])
            if len(positions) < self.graph.size(node):
                # No label left means that the best assignment is optimal; one keeps the graph well formed.
                positions = positions if len(positions) else np.array([0])
                self.graph.restrict(node, positions)
                kept[node] = self.graph.domains[node]
        if kept:
            self.graph.steps.append(Fix(messages=messages, cutoff=self.objective, kept=kept))
        simplify(self.graph)

    def _branch(self) -> None:
        """Let HiGHS close the core. Its bound is not part of the proof log."""
        self.exhausted = True
        if self.graph.num_labels() > MAX_BRANCH_LABELS:
            return
        core, nodes = core_of(self.graph)
        arena = core.arena
        found = mip.solve_core(
            [arena[token] for token in core.costs],
            [(u, v, arena[matrix]) for u, v, matrix in core.edges],
            time_limit=min(self.deadline.left(), BRANCH_SECONDS),
            relative_gap=self.gap,
            stop=self.deadline.stop,
        )
        self.method = "branch and bound"
        if found.labels is not None:
            labels = {
                node: int(self.graph.domains[node][label]) for node, label in zip(nodes, found.labels, strict=True)
            }
            self._offer(back_substitute(self.graph, labels))
        self.bound = max(self.bound, min(found.bound + self.graph.constant, self.objective))


def value_of(graph: Graph, labels: Integers) -> float:
    """Return the cost of original labels on the living part of `graph`; infinite if one of them is gone."""
    arena, nodes = graph.arena, graph.nodes()
    chosen: dict[int, int] = {}
    for node in nodes:
        position = int(np.searchsorted(graph.domains[node], labels[node]))
        if position == graph.size(node) or graph.domains[node][position] != labels[node]:
            return np.inf
        chosen[node] = position
    value = graph.constant + sum(float(arena[graph.costs[node]][chosen[node]]) for node in nodes)
    return value + sum(float(arena[matrix][chosen[u], chosen[v]]) for u, v, matrix in graph.edges())

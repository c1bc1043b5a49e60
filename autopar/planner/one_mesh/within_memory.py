"""Within memory: the optimum under the memory limit, found in rounds of solving and measuring.

    round 0   the optimum without a limit: where its lowered program fits, it is the answer; nothing is recomputed
    round 1   the problem with recomputation (`recomputation.py`) and one row per moment (`memory_rows.py`), with the
              transients that round 0 showed
    round 2   the same with the transients of round 1, should its program hold more than the limit
    again     where blocks made again one by one do not fit, the same with spans of blocks (`spans.py`), and nested
    first     where it was asked for, with the memory of the host (`host_labels.py`), if copies hide; else last

So the limit holds for the program that runs, whatever the rows leave out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.lowered_bytes import transient_bytes
from autopar.planner.memory.memory_rows import MemoryModel
from autopar.planner.memory.nested_spans import fastest_nested
from autopar.planner.memory.possible_forms import allowed_forms
from autopar.planner.memory.recomputation import (
    DROPPED,
    FORM_STATES,
    ON_HOST,
    RECOMPUTED,
    SAVED,
    expand,
    repeatable,
    with_states,
)
from autopar.planner.memory.shortage import DoesNotFit, SearchEnded, Slower, fullest_parts
from autopar.planner.memory.spans import SpanBytes, smallest_spans
from autopar.planner.one_mesh.form_labels import FormLabels
from autopar.planner.one_mesh.host_labels import PHASES, HostLabels
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.build import Built
from autopar.planner.problem.constraint_targets import recompute_of
from autopar.planner.problem.factorisation import Value, shape_of
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.prices import Floats, tensor_bytes
from autopar.planner.problem.strategies import local_fraction
from autopar.planner.solver import (
    MemoryRow,
    Problem,
    Solution,
    Status,
    certified,
    evaluate,
    is_forbidden,
    solve,
)
from autopar.plans.next_gib import next_gib_statistics
from autopar.plans.plan_text import format_bytes
from autopar.timing import phase

MEMORY_GAP = 1e-3
ALONE, SPANS, NESTED = "block by block", "in spans of blocks", "in nested spans"
HIDDEN, STOPPING = "with copies to the host that hide", "with copies to the host"
"""Ways to make room, in the words of an error."""
ORDERS = ((SAVED, DROPPED, RECOMPUTED), (RECOMPUTED, SAVED, DROPPED))
"""States that a start may take: as much as possible saved, as much as possible recomputed."""
ON_HOST_ORDERS = ((ON_HOST, SAVED, DROPPED, RECOMPUTED), (RECOMPUTED, ON_HOST, SAVED, DROPPED))
"""As much as possible on the host; as little as possible on the device: what cannot be made again is on the host."""
SMALLEST_FORMS = tuple(sorted(FORM_STATES.values(), reverse=True))
FORM_ORDERS = ((*SMALLEST_FORMS, SAVED, DROPPED, RECOMPUTED), (RECOMPUTED, *SMALLEST_FORMS, SAVED, DROPPED))
"""As much as possible in as little room as there is; what cannot be made again is."""
Labels = NDArray[np.int64]


@dataclass(slots=True)
class WithinMemory:
    """The rounds of one mesh. built: the problem in which labels are to be read. starts: assignments of the plain
    problem from which the search may begin. known: solutions of earlier rounds; prices: what a byte was worth in the
    latest one, seconds per position."""

    query: Query
    mesh: Mesh
    plain: Built
    built: Built
    lifetimes: Lifetimes
    starts: Sequence[Labels]
    models: dict[int, MemoryModel]
    beyond: Floats
    known: list[Labels]
    prices: dict[int, float]
    began: float
    """CPU seconds of the process when the search began."""
    links: tuple[MemoryRow, ...] = ()
    """What the links to the host can move, where copies are to hide, and what its memory can hold."""
    ahead: float = 0.0
    """Bytes that stay free for copies and gathers that are under way."""
    way: str = ALONE
    """How it makes room, in words."""
    has_forms: bool = False
    """Whether something may be saved in less room."""

    @staticmethod
    def of(
        query: Query,
        mesh: Mesh,
        plain: Built,
        lifetimes: Lifetimes,
        starts: Sequence[Labels],
        hidden_copies: bool | None = None,
        way: str = ALONE,
    ) -> WithinMemory:
        """The problem with recomputation as far as the query allows it; with the memory of the host where
        `hidden_copies` says whether copies to it are to hide."""
        by_operator = recompute_of(query.program, query.constraints)
        forms = form_labels(query, mesh, lifetimes)
        smaller = forms.candidates(plain)
        nowhere = query.recompute == "none" and not by_operator and hidden_copies is None and not smaller
        built = plain if nowhere else expand(plain, lifetimes, query.recompute, by_operator)
        built = forms.added(built, smaller) if smaller else built
        links, ahead = tuple[MemoryRow, ...](), 0.0
        if hidden_copies is not None:
            labels = host_labels(query, mesh, lifetimes, hidden=hidden_copies)
            built, links, ahead = labels.added(built, kernel_seconds(plain, starts[0]))
            ahead = min(ahead, LIMITS.ahead_share * query.budget_bytes) if hidden_copies else 0.0
        models = {id(each): MemoryModel(each, mesh, query.state_bytes, lifetimes) for each in (plain, built)}
        beyond = np.zeros(lifetimes.end + 1)
        began = time.process_time()
        known, prices = list[Labels](), dict[int, float]()
        return WithinMemory(
            query, mesh, plain, built, lifetimes, starts, models, beyond, known, prices, began, links, ahead, way,
            bool(smaller),
        )  # fmt: skip

    @staticmethod
    def each(
        query: Query,
        mesh: Mesh,
        plain: Built,
        lifetimes: Lifetimes,
        starts: Sequence[Labels],
        too_large: dict[str, float],
    ) -> Iterator[WithinMemory]:
        """The problems to try in turn, until one has an answer: every segment made again by itself, then spans of
        segments (`spans.py`), then these nested (`nested_spans.py`), where they hold less. "full" begins with the cut
        that holds least; where the host was asked for, it comes first with copies that hide, and last with others. What
        else is held, the one before tells the nested ones: each is asked for behind the other. too_large: takes the
        ways that are left out, with the least that they need.
        """
        of = partial(WithinMemory.of, query, mesh, plain, starts=starts)
        on_host = bool(query.may_wait_on_host)
        if on_host:
            yield of(lifetimes, hidden_copies=True, way=HIDDEN)
        by_operator = recompute_of(query.program, query.constraints)
        may_repeat = repeatable(plain, query.recompute, by_operator)
        spans = SpanBytes.of(lifetimes, partial(local_bytes, plain, mesh, starts[0]), may_repeat)
        alone, cut = tuple(range(len(lifetimes.segments.names))), smallest_spans(spans)
        is_smaller = spans.peak(alone) - spans.peak(cut) > LIMITS.least_relief_of_spans * spans.peak(alone)
        if not is_smaller or query.recompute != "full":
            yield (search := of(lifetimes))
        if is_smaller:
            yield (search := of(lifetimes.joined(cut), way=SPANS))
        room = query.budget_bytes - search.least_bytes + spans.peak(cut if is_smaller else alone)
        seconds = seconds_of_segments(plain, lifetimes, starts[0])
        for share in LIMITS.nested_rooms if query.recompute != "none" else ():
            nested = fastest_nested(spans, seconds, share * room)
            if nested is not None and nested.starts != alone:
                search = of(lifetimes.joined(nested.starts, nested.given_up(lifetimes)), way=NESTED)
                least = search.least_bytes
                if least <= query.budget_bytes:
                    yield search
                else:
                    too_large[NESTED] = min(least, too_large.get(NESTED, least))
        if on_host:
            yield of(lifetimes, hidden_copies=False, way=STOPPING)

    @property
    def least_bytes(self) -> float:
        """At the fullest moment where as much as possible is made again."""
        model = self.models[id(self.built)]
        again = with_states(self.plain, self.built, self.starts[0], (RECOMPUTED, SAVED, DROPPED))
        return float((model.over_time(again) + self.beyond).max())

    @property
    def seconds(self) -> float:
        """CPU seconds that the next solve may take: what is left, or the part of all that solves which begin with the
        answer of an earlier one need, or what a problem of this size needs, up to all of it."""
        everything = self.query.search.memory_seconds
        needed = LIMITS.memory_seconds_per_variable * len(self.built.problem.node_costs)
        left = everything - (time.process_time() - self.began)
        return max(left, LIMITS.least_memory_share * everything, min(needed, everything))

    def learn(self, built: Built, labels: Labels, measured: Floats) -> None:
        """Take what every moment of a lowered plan holds beyond its row as transient."""
        modelled = self.models[id(built)].over_time(labels)
        beyond = transient_bytes(measured, modelled)
        was_short = built is self.built and np.nanmax(measured) > self.query.budget_bytes
        self.beyond = np.maximum(beyond, self.beyond) if was_short else beyond

    def next_gib(self, solution: Solution, free_bound: float) -> Mapping[str, float]:
        """What the latest solution says of more memory, for the statistics of its plan."""
        price = sum(self.prices.values())
        return next_gib_statistics(solution.objective, solution.certificate.proven_bound, price, free_bound)

    @phase("solve")
    def solve(self) -> Solution:
        """The optimum under the limit, as far as the moments are known. Raises DoesNotFit, SearchEnded and Slower."""
        model = self.models[id(self.built)]
        orders = (*ORDERS, *self._other_orders)
        starts = [with_states(self.plain, self.built, start, states) for start in self.starts for states in orders]
        plans = [model.over_time(labels) + self.beyond for labels in (*starts, *self.known)]
        positions, limit = model.fullest_positions(plans), self.query.budget_bytes - self.ahead
        for _ in range(LIMITS.moment_rounds):
            rows = model.rows(positions, limit, self.beyond)
            solution = self._solve((*rows, *self.links), positions)
            held = model.over_time(solution.assignment) + self.beyond
            missed = [p for p in model.fullest_positions([held]) if held[p] > limit]
            if set(missed) <= set(positions):
                break
            positions = sorted({*positions, *missed})
        return solution

    def _solve(self, rows: tuple[MemoryRow, ...], positions: Sequence[int]) -> Solution:
        query = self.query
        problem = replace(self.built.problem, memory_rows=rows)
        seconds = self.seconds
        solution = solve(
            problem,
            gap=MEMORY_GAP,
            time_limit=query.seconds_left(),
            cpu_limit=seconds,
            warm_start=self._start(problem, LIMITS.start_share * seconds),
            warm_multipliers=[*(self.prices.get(position, 0.0) for position in positions), *[0.0] * len(self.links)],
            stop=query.deadline.stop,
            stop_above=query.stop_above,
        )
        if solution.lower_bound > query.stop_above and solution.status is not Status.INFEASIBLE:
            raise Slower(self.mesh, solution.lower_bound, query.stop_above, "under the memory limit")
        fits = _fits(problem, solution.assignment)
        if solution.statistics.get("forbidden") if fits else solution.status is not Status.INFEASIBLE:
            raise SearchEnded(self.mesh, seconds, query.budget_bytes)
        if solution.status is Status.INFEASIBLE or not fits:
            moments = [row for row in rows if row not in self.links]
            needed, parts = _fullest(self.built, moments, solution.assignment)
            beside = _too_full(self.links, solution.assignment) if needed <= query.budget_bytes else ""
            raise DoesNotFit(self.mesh, needed, query.budget_bytes, parts, beside)
        self.known.append(solution.assignment)
        self.prices = dict(zip(positions, solution.certificate.multipliers, strict=False))
        return certified(problem, solution)

    def _start(self, problem: Problem, seconds: float) -> Labels | None:
        """The best choice of states for a start whose strategies are held, else the start that fits best."""
        found: list[tuple[float, float, Labels]] = []
        for labels in self.known:
            _note(problem, labels, found)
        for start in self.starts:
            _note(problem, with_states(self.plain, self.built, start, (SAVED, DROPPED, RECOMPUTED)), found)
            again = with_states(self.plain, self.built, start, (RECOMPUTED, SAVED, DROPPED))
            fits = _note(problem, again, found)
            for states in self._other_orders:
                away = with_states(self.plain, self.built, start, states)
                if _note(problem, away, found) and not fits:
                    fits, again = True, away
            if fits and self.built is not self.plain and not self.known:
                _note(problem, self._states_of(problem, start, again, seconds), found)
        return min(found, key=lambda each: each[:2])[2] if found else None

    @property
    def _has_host_labels(self) -> bool:
        return bool(self.links)

    @property
    def _other_orders(self) -> Sequence[tuple[int, ...]]:
        """Those with the host, and with forms, where there are some."""
        return (*(ON_HOST_ORDERS if self._has_host_labels else ()), *(FORM_ORDERS if self.has_forms else ()))

    def _states_of(self, problem: Problem, start: Labels, again: Labels, seconds: float) -> Labels:
        """The best states beside the strategies of `start`: a small problem, which often answers the large one."""
        kept, small = held(problem, [len(costs) for costs in self.plain.problem.node_costs], start)
        within = [int(np.flatnonzero(rows == label)[0]) for rows, label in zip(kept, again, strict=True)]
        solution = solve(
            small,
            gap=MEMORY_GAP,
            time_limit=self.query.seconds_left(),
            cpu_limit=seconds,
            warm_start=np.array(within),
            stop=self.query.deadline.stop,
        )
        return np.array([rows[label] for rows, label in zip(kept, solution.assignment.tolist(), strict=True)])


def host_labels(query: Query, mesh: Mesh, lifetimes: Lifetimes, *, hidden: bool) -> HostLabels:
    """What adds labels on the host for a query."""
    return HostLabels(
        cluster=query.cluster,
        mesh=mesh,
        state_bytes=query.state_bytes,
        lifetimes=lifetimes,
        may_wait=query.may_wait_on_host,
        count=1 if query.micro is None else query.micro.count,
        hidden=hidden,
    )


def form_labels(query: Query, mesh: Mesh, lifetimes: Lifetimes) -> FormLabels:
    """What adds labels of forms for a query."""
    return FormLabels(
        device=query.cluster.device,
        mesh=mesh,
        lifetimes=lifetimes,
        rounded=allowed_forms(query.lossy),
        count=1 if query.micro is None else query.micro.count,
    )


def kernel_seconds(plain: Built, labels: Labels) -> dict[str, float]:
    """Seconds of the operators of each phase, in a step."""
    found = dict.fromkeys(PHASES, 0.0)
    for node, index in plain.operators.items():
        found[str(node.meta["phase"])] += float(plain.variables[index].costs[labels[index]])
    return found


def local_bytes(built: Built, mesh: Mesh, labels: Labels, value: Value) -> float:
    """Bytes of an output of an operator on the fullest rank, under labels of the plain problem."""
    node, output = value
    index = built.operators[node]
    layouts = built.variables[index].layouts[output]
    if layouts is None:
        return 0.0
    layout = layouts.distinct[layouts.index[labels[index]]]
    return tensor_bytes(node, output) * local_fraction(layout, shape_of(node, output), mesh)


def seconds_of_segments(built: Built, lifetimes: Lifetimes, labels: Labels) -> list[float]:
    """Of the operators of forward, under labels of the plain problem."""
    seconds = [0.0] * len(lifetimes.segments.names)
    for node, segment in lifetimes.segment.items():
        if node.meta["phase"] != "backward":
            index = built.operators[node]
            seconds[segment] += float(built.variables[index].costs[labels[index]])
    return seconds


def _note(problem: Problem, labels: Labels, found: list[tuple[float, float, Labels]]) -> bool:
    """Add (bytes over the limit, seconds, labels) where nothing is forbidden; whether it fits."""
    objective, used = evaluate(problem, labels)
    if is_forbidden(np.asarray(objective)):
        return False
    over = max(total - row.budget_bytes for total, row in zip(used, problem.memory_rows, strict=True))
    found.append((max(0.0, over), objective, labels))
    return over <= 0.0


def held(problem: Problem, sizes: Sequence[int], labels: Labels) -> tuple[list[Labels], Problem]:
    """(labels that are left, the problem of them): every node keeps its plain label, in all of its states.

    sizes: number of plain labels of every node; the labels of an expanded node are states times these.
    """
    kept = [
        np.arange(label, len(costs), size)
        for label, size, costs in zip(labels.tolist(), sizes, problem.node_costs, strict=True)
    ]
    return kept, replace(
        problem,
        node_costs=tuple(costs[rows] for costs, rows in zip(problem.node_costs, kept, strict=True)),
        edges=tuple(
            replace(edge, costs=edge.costs[np.ix_(kept[edge.source], kept[edge.target])]) for edge in problem.edges
        ),
        memory_rows=tuple(
            replace(row, bytes={index: sizes_[kept[index]] for index, sizes_ in row.bytes.items()})
            for row in problem.memory_rows
        ),
    )


def _fits(problem: Problem, labels: Labels) -> bool:
    _, used = evaluate(problem, labels)
    return all(total <= row.budget_bytes * (1 + 1e-9) for total, row in zip(used, problem.memory_rows, strict=True))


def _too_full(rows: Sequence[MemoryRow], labels: Labels) -> str:
    """What the first row that is over its budget would hold, in words."""
    for row in rows:
        held = row.constant_bytes + sum(float(sizes[labels[index]]) for index, sizes in row.bytes.items())
        if held > row.budget_bytes:
            return f"{row.name} would take {format_bytes(held)} of {format_bytes(row.budget_bytes)} for each device"
    return ""


def _fullest(built: Built, rows: Sequence[MemoryRow], labels: Labels) -> tuple[float, dict[str, float]]:
    """(bytes of the fullest moment under an assignment, transients included; its largest parts)."""
    held = [row.constant_bytes + sum(float(sizes[labels[index]]) for index, sizes in row.bytes.items()) for row in rows]
    fullest = rows[int(np.argmax(held))]
    _, parts = fullest_parts(built, [fullest], labels)
    return max(held), parts

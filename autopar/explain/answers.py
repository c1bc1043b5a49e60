"""Answers: what a plan says when it is asked, as values that print themselves.

    print(plan.explain("lm_head.weight"))         an `Explanation`: layout, cost by term, runner-up, what binds
    print(plan.explain(vs="ddp"))                 a `Comparison`: where two plans part, and what each difference costs
    print(plan.memory())                          a `MemoryTable`: the peak by kind, by module and over time
    print(plan.code(rank=0))                      a `RankProgram`: what one rank runs, line by line

`document()` of each is the same as JSON values, for `--json`. The other modules of `autopar.explain` compute them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from autopar.explain.memory_ladder import MemoryLadder
from autopar.plans.next_gib import NextGib
from autopar.plans.plan_text import (
    LAYOUT_LEGEND,
    ZIGZAG_LEGEND,
    align,
    format_bytes,
    format_seconds,
    without_numbers,
)

OPTIMUM_ROUNDING = 1e-9
"""Relative difference below which two objectives are the same: rounding of the sums."""
TIE_BREAK = "tie-break"
"""The kind of a term that only orders equal choices."""
LEAST_SHOWN = 1e-9
"""Seconds below which a term is rounding, or stands at the kernel that it runs in."""
EQUAL_PLANS = (
    "the plans are equal: every parameter and every operator lies the same on every axis of the mesh, and pays the "
    "same seconds term by term"
)
EQUAL_LAYOUTS = (
    "the layouts are equal: every parameter and every operator lies the same and pays the same seconds; what differs "
    "is how collectives are joined and started, or the number of micro-batches"
)
LARGEST_LINES = 30
"""Lines that a printed comparison or table has at most; the value holds all."""


@dataclass(frozen=True, slots=True)
class Term:
    """Seconds per step that one parameter, operator or output pays. kind: "compute", "optimizer", "tie-break", "slice"
    (a local copy) or a collective; axes: names of those that it crosses."""

    name: str
    kind: str
    axes: tuple[str, ...]
    seconds: float

    @property
    def label(self) -> str:
        """ "all_gather over dp_shard"; "compute"."""
        return f"{self.kind} over {'+'.join(self.axes)}" if self.axes else self.kind


def by_label(terms: Iterable[Term]) -> dict[str, float]:
    """Seconds per label, largest first."""
    found: dict[str, list[float]] = {}
    for term in terms:
        found.setdefault(term.label, []).append(term.seconds)
    return dict(sorted(((label, math.fsum(s)) for label, s in found.items()), key=lambda item: -abs(item[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What it costs to forbid a choice, with everything else free to follow. choice: what takes its place in the best
    plan that was found; seconds: what that plan costs more per step; at_least: no plan without the choice costs less
    more; followers: other decisions that then change; needed_memory: only a plan that fits into memory counted."""

    choice: str
    seconds: float
    at_least: float
    followers: int
    needed_memory: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether what was found is proven to be the cheapest."""
        return self.seconds - self.at_least <= max(abs(self.seconds), 1e-9) * 1e-3

    @property
    def remark(self) -> str:
        """What the search for it says beside its seconds."""
        proven = "proven" if self.is_exact else f"found; proven: at least {signed(self.at_least)}"
        others = "1 other choice follows" if self.followers == 1 else f"{self.followers} other choices follow"
        return f"the runner-up, {proven}; {others if self.followers else 'nothing else changes'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A limit without which the plan would cost less. gain_seconds: how much less; instead: what the explained choice
    would then be (None: the same)."""

    constraint: str
    gain_seconds: float
    instead: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One choice, or `count` equal ones of repeated layers (name: of the first). layout: lines in words; terms: what it
    pays per step; nbytes: what it holds at the fullest moment; nearest: other choices with what each adds while
    everything else is held; switch: with everything else free to follow."""

    name: str
    count: int
    layout: tuple[str, ...]
    terms: tuple[Term, ...] = ()
    nbytes: float | None = None
    nearest: tuple[tuple[str, float], ...] = ()
    switch: Switch | None = None
    bindings: tuple[Binding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def total_seconds(self) -> float:
        """What it pays per step."""
        return math.fsum(term.seconds for term in self.terms)

    def __str__(self) -> str:
        lines = [*self.layout]
        if self.count > 1:
            lines[0] += f" and {self.count - 1} like it in other layers"
        if self.nbytes is not None:
            lines.append(f"  holds     {format_bytes(self.nbytes)} at the fullest moment of the step")
        without = [
            f"  without the {binding.constraint}  {binding.instead}"
            for binding in self.bindings
            if binding.instead is not None
        ]
        return "\n".join([*lines, *self._seconds(), *without, *(f"  {note}" for note in self.notes)])

    def _seconds(self) -> list[str]:
        """The table of what it costs, and of what it would cost more otherwise."""
        paid = {label: seconds for label, seconds in by_label(self.terms).items() if label != TIE_BREAK}
        rows = [("costs per step", format_seconds(self.total_seconds), "")] if self.total_seconds > LEAST_SHOWN else []
        if len(paid) > 1:
            rows += [
                (f"  {label}", format_seconds(seconds), f"{seconds / self.total_seconds:.0%}")
                for label, seconds in paid.items()
                if abs(seconds) > LEAST_SHOWN
            ]
        elif rows:
            rows = [(f"costs per step, {next(iter(paid), TIE_BREAK)}", rows[0][1], "")]
        if self.switch is not None:
            rows.append((f"instead {self.switch.choice}", signed(self.switch.seconds), self.switch.remark))
        searched = None if self.switch is None else self.switch.choice
        rows += [
            (f"instead {choice}", signed(seconds), "while all else stays")
            for choice, seconds in self.nearest
            if choice != searched
        ]
        names, times = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        return [f"  {name:<{names}}  {time:>{times}}  {remark}".rstrip() for name, time, remark in rows]

    @property
    def others(self) -> list[dict[str, object]]:
        """`nearest` as JSON values."""
        return [{"instead": text, "delta_seconds": delta} for text, delta in self.nearest]

    def document(self) -> dict[str, object]:
        """The explanation as JSON values."""
        return {
            "name": self.name,
            "count": self.count,
            "text": str(self),
            "seconds": by_label(self.terms),
            "bytes": self.nbytes,
            "alternatives": self.others,
            "runner_up": None if self.switch is None else {**asdict(self.switch), "is_exact": self.switch.is_exact},
            "binding": [asdict(binding) for binding in self.bindings],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanations:
    """Several choices at once, in the order of the plan. axes: of the mesh, with their links; limits: of the plan that
    were taken away one at a time, with the seconds per step that it would then cost less (0: it does not bind);
    next_gib: what more memory would buy, where its limit binds."""

    choices: tuple[Explanation, ...]
    axes: tuple[str, ...] = ()
    limits: tuple[tuple[str, float], ...] = ()
    next_gib: NextGib | None = None

    def __str__(self) -> str:
        lines = [f"mesh axis {axis}" for axis in self.axes]
        for limit, gain in self.limits:
            said = f"binds: without it the plan costs {format_seconds(gain)} less per step"
            lines.append(f"{limit}: {said if gain > 0 else 'does not bind'}")
        lines += [] if self.next_gib is None else [str(self.next_gib)]
        has_zigzag = any("zigzag" in line for choice in self.choices for line in choice.layout)
        head = ["\n".join([*lines, LAYOUT_LEGEND, *([ZIGZAG_LEGEND] if has_zigzag else [])])]
        if len(self.choices) > 1:
            head.append(align(("choice", "is", "costs per step", "otherwise"), map(_overview, self.choices)))
        return "\n\n".join([*head, *map(str, self.choices)])

    def document(self) -> dict[str, object]:
        """The explanations as JSON values."""
        return {
            "text": str(self),
            "axes": list(self.axes),
            "limits": [{"limit": limit, "gain_seconds": gain} for limit, gain in self.limits],
            "next_gib": None if self.next_gib is None else self.next_gib.document(),
            "choices": [choice.document() for choice in self.choices],
        }


def _overview(choice: Explanation) -> tuple[str, str, str, str]:
    """A choice in one line: what it is, what it pays, and what the cheapest other choice adds."""
    others = [seconds for _, seconds in choice.nearest]
    more = choice.switch.seconds if choice.switch is not None else min(others, default=None)
    is_parameter = choice.layout[0].startswith("parameter ")
    is_chosen = choice.layout[1].strip() if len(choice.layout) > 1 else ""
    return (
        choice.name + (f" x{choice.count}" if choice.count > 1 else ""),
        is_chosen.removeprefix("stored").strip() if is_parameter else is_chosen,
        format_seconds(choice.total_seconds) if choice.total_seconds > LEAST_SHOWN else "",
        "" if more is None else signed(more),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A group of repeated layers (pattern) in which two plans part, or pay differently. seconds: per label of a term,
    what `this` pays more than `other`; choices: of this and of the other plan, where they differ."""

    pattern: str
    count: int
    seconds: Mapping[str, float]
    choices: tuple[str, str] | None

    @property
    def total(self) -> float:
        """Seconds by which the two plans differ here, over all kinds."""
        return math.fsum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two plans at the same prices. differences: largest first; their totals add up to `objective_seconds` of this less
    those of the other. step_seconds: as predicted, where communication runs beside computation. is_played: one of the
    two has stages, so that both were simulated: `objective_seconds` are the simulated steps, and the differences those
    of an average device."""

    names: tuple[str, str]
    objective_seconds: tuple[float, float]
    step_seconds: tuple[float, float]
    peak_bytes: tuple[float, float]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    is_played: bool = False

    def __str__(self) -> str:
        this, other = self.names
        rows = [
            ("simulated step" if self.is_played else "sum of costs", *map(format_seconds, self.objective_seconds)),
            ("predicted step", *map(format_seconds, self.step_seconds)),
            ("memory per device", *map(format_bytes, self.peak_bytes)),
        ]
        if not self.differences:
            head = align(("", this, other), rows)
            is_same = self.step_seconds[0] == self.step_seconds[1] and self.peak_bytes[0] == self.peak_bytes[1]
            return "\n".join([head, "", EQUAL_PLANS if is_same else EQUAL_LAYOUTS, *self.notes])
        parts = [(label, signed(seconds)) for label, seconds in self.by_label().items() if abs(seconds) > 0]
        lines = [align(("", this, other), rows), "", align((f"{this} less {other}, by term", "per step"), parts), ""]
        lines.append("where they part, largest first")
        for difference in self.differences[:LARGEST_LINES]:
            lines += _difference_lines(difference, self.names)
        rest = self.differences[LARGEST_LINES:]
        if rest:
            left = signed(math.fsum(difference.total for difference in rest))
            lines.append(f"and {len(rest)} smaller ones, together {left}")
        return "\n".join([*lines, *self.notes])

    def by_label(self) -> dict[str, float]:
        """Label of a term -> what this plan pays more, largest first."""
        labels = {label for difference in self.differences for label in difference.seconds}
        found = {label: math.fsum(d.seconds.get(label, 0.0) for d in self.differences) for label in labels}
        return dict(sorted(found.items(), key=lambda item: (-abs(item[1]), item[0])))

    def document(self) -> dict[str, object]:
        """The comparison as JSON values; seconds and bytes."""
        return {
            **{
                name: list(getattr(self, name)) for name in ("names", "objective_seconds", "step_seconds", "peak_bytes")
            },
            "by_term": self.by_label(),
            "differences": [{**asdict(d), "total": d.total} for d in self.differences],
            "is_played": self.is_played,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one stage holds: states, and the activations of micro-batches in flight. ranks: first and last; in_flight:
    the most that are between the begin of its forward and the end of its backward at once; peak_bytes: of one rank of
    the group, with its other stages."""

    stage: int
    name: str
    ranks: tuple[int, int]
    state_bytes: float
    in_flight: int
    bytes_per_micro_batch: float
    peak_bytes: float

    @property
    def activation_bytes(self) -> float:
        """Of all micro-batches in flight."""
        return self.in_flight * self.bytes_per_micro_batch

    @property
    def row(self) -> tuple[str, str, str, str, str, str]:
        """The stage as words of a table's row."""
        first, last = self.ranks
        return (
            f"{self.stage} ({self.name})",
            f"{first}" if first == last else f"{first} .. {last}",
            format_bytes(self.state_bytes),
            f"{self.in_flight} x {format_bytes(self.bytes_per_micro_batch)}",
            format_bytes(self.activation_bytes),
            format_bytes(self.peak_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """The fullest moment of a step on one rank, in bytes. by_kind: parameters, optimizer state, gradients, ...; their
    sum is `peak_bytes`; by_module: layers that repeat are one; over_time: (moment, bytes), the fullest operator of
    every module in the order in which it runs, or with stages of every pass ("2F0": stage 2, forward of micro-batch 0).
    limit_bytes: what the plan may fill; stages: what each stage keeps, where there are stages; communicator_bytes: what
    NCCL is expected to hold beside all that for the groups of the rank (`communicators` of them), not in the peak; the
    default limit leaves room for the group of all ranks, and for that of a node where there are several. ladder: by
    which ways backward comes to what it reads, where these are several; next_gib: what more memory would buy, where the
    limit was part of the solve."""

    rank: int
    moment: str
    peak_bytes: float
    limit_bytes: float | None
    by_kind: Mapping[str, float]
    by_module: Mapping[str, float]
    over_time: tuple[tuple[str, float], ...] = field(default=())
    stages: tuple[StageMemory, ...] = ()
    communicators: int = 0
    communicator_bytes: float = 0.0
    ladder: MemoryLadder | None = None
    next_gib: NextGib | None = None

    def __str__(self) -> str:
        limit = "" if self.limit_bytes is None else f" of {format_bytes(self.limit_bytes)}"
        tables: list[tuple[str, Iterable[tuple[str, float]]]] = [
            ("kind", self.by_kind.items()),
            ("module", list(self.by_module.items())[:LARGEST_LINES]),
            ("moment", self._moments()),
        ]
        lines = [f"rank {self.rank}: {format_bytes(self.peak_bytes)}{limit} at {self.moment}"]
        if self.communicators:
            about = f"about {format_bytes(self.communicator_bytes)} of NCCL's"
            lines.append(f"beside that {about}, not measured here (process groups: {self.communicators})")
        for title, entries in tables:
            rows = [(name, format_bytes(size), f"{size / self.peak_bytes:.1%}") for name, size in entries]
            lines += ["", align((title, "memory", "of the peak"), rows)]
        if self.stages:
            head = ("stage", "ranks", "states", "micro-batches in flight", "their activations", "peak of the rank")
            lines += ["", align(head, [stage.row for stage in self.stages])]
        if self.ladder is not None:
            lines += ["", *self.ladder.lines()]
        if self.next_gib is not None:
            lines += ["", str(self.next_gib)]
        return "\n".join(lines)

    def _moments(self) -> list[tuple[str, float]]:
        """`over_time` with neighbouring blocks that repeat as one; of many passes, the first and the fullest ones."""
        runs = itertools.groupby(self.over_time, key=lambda entry: without_numbers(entry[0]))
        found = [(name, max(size for _, size in run)) for name, run in runs]
        if not self.stages or len(found) <= LARGEST_LINES:
            return found
        shown = sorted(range(len(found)), key=lambda index: -found[index][1])[:LARGEST_LINES]
        return [found[index] for index in sorted(shown)]

    def document(self) -> dict[str, object]:
        """The table as JSON values, in bytes."""
        return {
            **asdict(self),
            "over_time": [list(entry) for entry in self.over_time],
            "ladder": None if self.ladder is None else self.ladder.document(),
            "next_gib": None if self.next_gib is None else self.next_gib.document(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """What one rank runs: readable Python, each line with its module, local layout and predicted seconds."""

    rank: int
    text: str
    seconds: float

    def __str__(self) -> str:
        return self.text

    def document(self) -> dict[str, object]:
        """The program as JSON values."""
        return asdict(self)


def signed(seconds: float) -> str:
    """ "+1.2 ms", "-3 us"."""
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _parts(seconds: Mapping[str, float]) -> str:
    largest = sorted(seconds.items(), key=lambda item: -abs(item[1]))[:3]
    return ", ".join(f"{label} {signed(value)}" for label, value in largest if value)


def _difference_lines(difference: Difference, names: tuple[str, str]) -> list[str]:
    times = f" x{difference.count}" if difference.count > 1 else ""
    lines = [f"  {signed(difference.total):>9}  {difference.pattern}{times}: {_parts(difference.seconds)}"]
    if difference.choices is not None:
        said = zip(names, difference.choices, strict=True)
        lines += [f"{'':11}  {name}: {choice}" for name, choice in said]
    return lines

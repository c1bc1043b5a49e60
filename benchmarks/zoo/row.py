"""A row of the zoo: what happened to one architecture, kept as one line of JSON.

A row grows while it runs: workers report it after every phase, so a row that is killed still says how far it came.

    captured -> planned for step time, executed -> weights apart, executed -> no replicated compute, executed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.agreement import Agreement

STEP_TIME, APART, NO_REPLICATION = "step time", "weights apart", "no replicated compute"
REQUIRED = (STEP_TIME, APART)
"""Questions that every captured row must answer and pass; a plan without replication need not exist."""
LARGEST_REPLICATED_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plan for one question, and how it agrees with the plain model where it was executed.

    forced_by: what was asked beside the model ("memory limit 12.0 KiB, 0.50 of the weights and their state").
    sharded_share: of the parameter bytes, those stored split. replicated_share: of the FLOPs, those that some mesh
    axis of more than one device repeats.
    """

    forced_by: str = ""
    mesh: str = ""
    objective_seconds: float | None = None
    gap: float | None = None
    peak_bytes: float | None = None
    sharded_share: float | None = None
    replicated_share: float | None = None
    agreement: Agreement | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One architecture. phase: where it is; stopped: why it was ended from outside; error: why it was not captured.
    precision: fp64 where rounding in fp32 would allow so much that agreement proved nothing, or where fp32 disagreed:
    then in_fp32 says by how much."""

    name: str
    family: str
    phase: str = "start"
    stopped: str = ""
    error: str = ""
    captured: bool = False
    precision: str = "fp32"
    in_fp32: str = ""
    parameters: int = 0
    operators: int = 0
    uncovered: tuple[str, ...] = ()
    answers: Mapping[str, Answer] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Loss and all gradients are those of the plain model under every executed plan, two at least."""
        planned = {question: answer.agreement for question, answer in self.answers.items() if answer.mesh}
        agreements = [agreement is not None and agreement.agrees for agreement in planned.values()]
        return all(question in planned for question in REQUIRED) and all(agreements)

    @property
    def status(self) -> str:
        """In one or two words what became of the row."""
        if self.stopped:
            return self.stopped.partition(":")[0]
        if not self.captured:
            return "not captured"
        if self.agrees:
            return "agrees"
        verdicts = {answer.agreement.verdict for answer in self.answers.values() if answer.agreement is not None}
        return next((verdict for verdict in ("disagrees", "no evidence") if verdict in verdicts), "failed")

    @property
    def reasons(self) -> str:
        """Everything that went wrong, in one line."""
        found = [self.stopped, self.error] + [
            f"{name}: {answer.error}" for name, answer in self.answers.items() if answer.error
        ]
        for name, answer in self.answers.items():
            agreement = answer.agreement
            if agreement is not None and not agreement.agrees:
                found.append(
                    f"{name}: loss error {agreement.loss_error:.1e}, gradient of {agreement.worst_parameter} "
                    f"{agreement.gradient_error:.1e} of {agreement.allowed:.0e}"
                )
        return "; ".join(text for text in found if text)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The numbers that the zoo is judged by."""
    captured = [row for row in rows if row.captured]
    shares = [
        answer.replicated_share
        for row in captured
        if (answer := row.answers.get(NO_REPLICATION)) is not None and answer.replicated_share is not None
    ]
    phases = sorted({name for row in rows for name in row.seconds})
    return {
        "rows": len(rows),
        "captured_share": _share(len(captured), len(rows)),
        "compared_in_fp64": [row.name for row in captured if row.precision == "fp64"],
        "disagree_in_fp32": [row.name for row in rows if row.in_fp32],
        "agree_share": _share(sum(row.agrees for row in rows), len(rows)),
        "agree_of_captured_share": _share(sum(row.agrees for row in captured), len(captured)),
        "solved_without_replication": len(shares),
        "below_5_percent_replicated_share": _share(
            sum(share < LARGEST_REPLICATED_SHARE for share in shares), len(shares)
        ),
        "operators_without_rule": sorted({name.rpartition("/")[2] for row in rows for name in row.uncovered}),
        "status": {status: [row.name for row in rows if row.status == status] for status in _statuses(rows)},
        "median_seconds": {
            name: round(median(row.seconds[name] for row in rows if name in row.seconds), 2) for name in phases
        },
    }


def _statuses(rows: Sequence[Row]) -> list[str]:
    return sorted({row.status for row in rows})


def _share(count: int, total: int) -> float | None:
    return count / total if total else None

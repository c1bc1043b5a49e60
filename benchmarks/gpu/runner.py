"""Which stages run in this call, in which order, and the file that each leaves.

A call runs at most `FILES_PER_CALL` stages, and begins none whose limit is longer than what is left of its time. What
`--resume` holds as done is left out; what failed there is tried again, behind what was not tried yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import Found, in_child
from benchmarks.gpu.goals import verdicts
from benchmarks.gpu.machine import facts
from benchmarks.gpu.stage import Place, Row, Stage
from benchmarks.results import write_results

FILES_PER_CALL = 8
DONE, FAILED, LEFT = "done", "failed", "left"
FACTS_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the program. resume: results of earlier ones; seconds: what it may take; command: as it was typed."""

    place: Place
    output: Path
    resume: Sequence[Path]
    seconds: float
    command: Sequence[str]


def run_call(call: Call, stages: Sequence[Stage], say: Callable[[str], None]) -> dict[str, str]:
    """Run what the call has time for and write its files; the status of each stage by name.

    Raises SystemExit where there is no device to run on.
    """
    began = time.monotonic()
    found = in_child(lambda: facts(call.place), seconds=FACTS_SECONDS)
    if not found.rows:
        raise SystemExit("\n".join([*found.lines, "no CUDA device answers; --rehearse runs every stage on the CPU"]))
    machine = found.rows[0]
    statuses: dict[str, str] = {}
    for stage in ordered(stages, call.resume, call.place.rehearse):
        left = call.seconds - (time.monotonic() - began)
        files = sum(status != LEFT for status in statuses.values())
        why = reason_to_leave(stage, call.place, machine, files, left)
        if why:
            statuses[stage.name] = LEFT
            say(f"{stage.name}: left, {why}")
        else:
            content = run_stage(stage, call.place, machine, call.command)
            write_results(call.output / f"{stage.name}.json", content)
            statuses[stage.name] = content["status"]
            say(headline(content))
    return statuses


def reason_to_leave(stage: Stage, place: Place, machine: Row, files: int, seconds: float) -> str:
    """Why a stage does not run in this call; "" where it does. A rehearsal needs no devices and sends no files."""
    if seconds < stage.seconds:
        return f"it may take {stage.seconds:g} s, and this call has {seconds:.0f} s"
    if not place.rehearse and machine["device"]["count"] < stage.num_devices:
        return f"it needs {stage.num_devices} devices"
    if not place.rehearse and files == FILES_PER_CALL:
        return f"{FILES_PER_CALL} files come back of a call"
    return ""


def run_stage(stage: Stage, place: Place, machine: Row, command: Sequence[str]) -> dict[str, Any]:
    """What the file of a stage says, however it ended."""
    found = in_child(lambda: stage.rows(place), seconds=stage.seconds)
    failed = found.ending or any("error" in row for row in found.rows) or not found.rows
    return {
        "stage": stage.name,
        "what": stage.what,
        "status": FAILED if failed else DONE,
        "rehearsal": place.rehearse,
        "command": list(command),
        "commit": machine["commit"],
        "device": machine["device"],
        "versions": machine["versions"],
        "seconds": round(found.seconds, 1),
        "limit_seconds": stage.seconds,
        **_fault(found, bool(failed)),
        "verdicts": verdicts(stage.name, found.rows),
        "rows": found.rows,
    }


def _fault(found: Found, failed: bool) -> dict[str, Any]:
    return {"ending": found.ending, "last_lines": found.lines} if failed else {}


def ordered(stages: Sequence[Stage], resume: Sequence[Path], rehearse: bool) -> list[Stage]:
    """Without those that are done; those that failed come last. What was rehearsed is done for a rehearsal alone."""
    known = {stage.name: status_of(resume, stage.name, rehearse) for stage in stages}
    return sorted((stage for stage in stages if known[stage.name] != DONE), key=lambda s: known[s.name] == FAILED)


def status_of(folders: Sequence[Path], name: str, rehearse: bool) -> str | None:
    """Of a stage in earlier calls of the same kind: done where one of them did it; None where none ran it."""
    paths = [path for folder in folders if (path := folder / f"{name}.json").exists()]
    contents = [json.loads(path.read_text()) for path in paths]
    statuses = [str(content["status"]) for content in contents if content["rehearsal"] == rehearse]
    return min(statuses, key=lambda status: status != DONE, default=None)


def headline(content: dict[str, Any]) -> str:
    """One line for the terminal; the goals are those of a GPU."""
    found = content["verdicts"]
    missed = [f"{each['goal']} at {each['case']}: {each['value']:.3g}" for each in found if not each["met"]]
    errors = [f"{row['case']}: {row['error'].splitlines()[0][:160]}" for row in content["rows"] if "error" in row]
    goals = [f"{len(found) - len(missed)} of {len(found)} goals met", *missed]
    parts = [content["status"], f"{content['seconds']} s", content.get("ending", ""), *errors]
    parts += [] if content["rehearsal"] else goals
    return f"{content['stage']}: {'; '.join(part for part in parts if part)}"

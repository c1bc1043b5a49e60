"""Planner speed and proof: from importing torch to the lowered program of one rank, phase by phase.

    python -m benchmarks.planner --json                              every case, the raw solvers and the memory sweep
    python -m benchmarks.planner --tasks                             what people ask first, baselines and all
    python -m benchmarks.planner --case gpt2@mesh2x4 llama3-8b@256       some cases only
    python -m benchmarks.planner --raw gpt2@mesh8 --seconds 60         the raw problem given to HiGHS and CP-SAT
    python -m benchmarks.planner --sweep gpt2@mesh8                     limits from roomy to just feasible

Each row runs in a process of its own, so that no row profits from another. Needs no GPU and allocates no weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.planner.cases import CASES, TASKS, case_named

SWEEPS = ("gpt2@mesh8", "gpt2@mesh2x4")


def run_here(kind: str, name: str, seconds: float) -> dict[str, Any]:
    """One row in this process."""
    case = case_named(name, TASKS if kind == "tasks" else CASES)
    if kind == "raw":
        from benchmarks.planner.raw import compare_raw

        return compare_raw(case, seconds)
    if kind == "sweep":
        from benchmarks.planner.sweep import sweep

        return sweep(case)
    from benchmarks.planner.measure import measure

    return measure(case)


def run_apart(kind: str, name: str, seconds: float) -> dict[str, Any]:
    """One row in a fresh interpreter; a row that fails says so and does not stop the others."""
    command = [sys.executable, "-m", "benchmarks.planner", f"--{kind}", name, "--seconds", str(seconds), "--here"]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return {"case": name, "failed": f"exit status {done.returncode}"}
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def print_row(kind: str, row: dict[str, Any]) -> None:
    """One row for people."""
    if "failed" in row:
        print(f"{row['case']}: failed: {row['failed']}")
    elif kind in ("case", "tasks"):
        print_case(row)
    elif kind == "raw":
        found = [f"{name} {_result(row[name])}" for name in ("ours", "HiGHS", "CP-SAT")]
        print(f"{row['case']}: {row['raw_variables']} raw variables: {'; '.join(found)}")
    else:
        print(f"{row['case']}: {row['promises']}")
        for limit in row["rows"]:
            print(f"    {_sweep_line(limit)}")


def print_case(row: dict[str, Any]) -> None:
    """Time, memory and proof of one case, and its phases."""
    phases = "  ".join(f"{name} {spent['cpu_seconds']:.1f}" for name, spent in row["phases"].items())
    goal = f" (goal {row['goal_cpu_seconds']:g}, must {row['must_cpu_seconds']})" if row["goal_cpu_seconds"] else ""
    print(
        f"{row['case']}: mesh {row['mesh']}, {row['cpu_seconds']:.1f} CPU s{goal}, "
        f"{row['peak_rss_bytes'] / 2**30:.2f} GiB, {row['nodes']} nodes, {row['statistics'].get('strategies')} "
        f"strategies, objective {row['objective_seconds'] * 1e3:.2f} ms, bound {row['bound_seconds'] * 1e3:.2f} ms, "
        f"gap {row['gap']:.1e}, {len(row['alternatives'])} other meshes\n    {phases}"
    )


def _result(found: dict[str, Any]) -> str:
    if "not_started" in found:
        return f"not started ({found['not_started']})"
    objective, bound = (found[key] for key in ("objective_seconds", "bound_seconds"))
    texts = ["none" if value is None else f"{value * 1e3:.3f} ms" for value in (objective, bound)]
    return f"{texts[0]} (bound {texts[1]}) in {found['cpu_seconds']:.1f} CPU s"


def _sweep_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['limit_bytes'] / 2**30:.2f} GiB: {row['error']}"
    return (
        f"{row['limit_bytes'] / 2**30:.2f} GiB: peak {row['peak_bytes'] / 2**30:.2f} GiB, objective "
        f"{row['objective_seconds'] * 1e3:.2f} ms, gap {row['gap']:.1e}, {row['recomputed_operators']} operators "
        f"recomputed, {row['micro_batches']} micro-batches, {row['cpu_seconds']:.1f} CPU s"
    )


def main() -> None:
    """Measure and print what was asked for; everything by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=None, help="names of cases")
    parser.add_argument("--tasks", nargs="*", default=None, help="names of tasks")
    parser.add_argument("--raw", nargs="*", default=None, help="cases whose raw problem goes to HiGHS and CP-SAT")
    parser.add_argument("--sweep", nargs="*", default=None, help="cases to plan under falling memory limits")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a raw solver")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--output", type=Path, help="also write the JSON document here")
    parser.add_argument("--here", action="store_true", help="one row in this process, as JSON")
    arguments = parser.parse_args()
    kinds = ("case", "tasks", "raw", "sweep")
    asked: dict[str, list[str]] = {kind: v for kind in kinds if (v := getattr(arguments, kind)) is not None}
    if arguments.here:
        ((kind, (name,)),) = asked.items()
        print(json.dumps(run_here(kind, name, arguments.seconds)))
        return
    everything = {"case": [c.name for c in CASES], "raw": [c.name for c in CASES if c.raw], "sweep": list(SWEEPS)}
    document: dict[str, list[dict[str, Any]]] = {}
    known = {**everything, "tasks": [task.name for task in TASKS]}
    for kind, names in (asked or everything).items():
        for name in names or known[kind]:
            row = run_apart(kind, name, arguments.seconds)
            document.setdefault(kind, []).append(row)
            if not arguments.json:
                print_row(kind, row)
    if arguments.json:
        print(json.dumps(document))
    if arguments.output:
        from benchmarks.results import write_results

        write_results(arguments.output, document)


if __name__ == "__main__":
    main()

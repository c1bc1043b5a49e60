"""Planner speed: from importing torch to the lowered program of one rank, phase by phase.

    python -m benchmarks.planner --workload gpt2 --mesh 8
    python -m benchmarks.planner --workload llama3-8b --mesh 32,8 --json
    python -m benchmarks.planner --workload gpt2 llama3-8b --output benchmarks/results/planner.json

CPU seconds count this process and its children; peak memory is the larger of both. Each row runs in a process of its
own, so that no row profits from another. Needs no GPU and allocates no weights.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

STARTED = (time.perf_counter(), time.process_time())

import torch  # noqa: E402 - what importing costs is a phase of its own

from autopar.capture import capture, normalize_example_inputs  # noqa: E402
from autopar.cluster import Cluster  # noqa: E402
from autopar.parallel_plan import Plan  # noqa: E402
from autopar.phases import PhaseTime, PhaseTimes, cpu_seconds  # noqa: E402
from autopar.planner.planning import make_plan  # noqa: E402
from autopar.program import Program  # noqa: E402
from benchmarks.models import WORKLOADS, workload  # noqa: E402
from benchmarks.results import write_results  # noqa: E402

IMPORTS = PhaseTime(time.perf_counter() - STARTED[0], time.process_time() - STARTED[1])

DEFAULT_MESHES = {"llama3-8b": ((8,), (32, 8)), "gpt2": ((8,), (2, 4))}
BATCH_OF_DEVICES = {("llama3-8b", 8): 16, ("llama3-8b", 256): 64}
"""Global batches of the peers' table; other cases take the batch of the workload."""
NO_LIMIT_BYTES = 2.0**50
Result = TypeVar("Result")


def measure(name: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Plan one workload on one mesh of H100 nodes of eight; one row of the report."""
    devices = math.prod(mesh)
    batch = BATCH_OF_DEVICES.get((name, devices), WORKLOADS[name].batch)
    (model, inputs), building = timed(lambda: workload(name, batch=batch))
    with PhaseTimes() as times:
        program, capturing = timed(lambda: capture(model, *normalize_example_inputs(inputs)))
        plan, planning = timed(lambda: plan_on(program, mesh))
    inside = times.phases
    phases = {
        "imports": IMPORTS,
        "build model": building,
        "capture": less(capturing, inside["tidy"]),
        "tidy": inside["tidy"],
        "enumerate and price": inside["price"],
        "solve": inside["solve"],
        "predict": inside["predict"],
        "lower": inside["lower"],
        "other planning": less(planning, inside["price"], inside["solve"], inside["predict"], inside["lower"]),
    }
    return {
        "workload": name,
        "mesh": list(mesh),
        "global_batch": batch,
        "seq": WORKLOADS[name].seq,
        "nodes": len(program.graph.nodes),
        "strategies": plan.statistics.get("strategies"),
        "phases": {key: {"seconds": t.seconds, "cpu_seconds": t.cpu_seconds} for key, t in phases.items()},
        "cpu_seconds": cpu_seconds(),
        "peak_rss_bytes": peak_rss_bytes(),
        "objective_seconds": plan.objective_seconds,
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "predicted_step_seconds": plan.predicted.step_seconds,
        "torch": torch.__version__,
    }


def plan_on(program: Program, mesh: tuple[int, ...]) -> Plan:
    """The optimum on one mesh with AdamW, without a memory limit: the peers' table has none either."""
    cluster = cluster_of(math.prod(mesh))
    return make_plan(
        program,
        cluster,
        mesh=mesh,
        optimizer=torch.optim.AdamW,
        memory_limit=NO_LIMIT_BYTES,
        with_baselines=False,
    )


def timed(work: Callable[[], Result]) -> tuple[Result, PhaseTime]:
    """The result of `work` and what it took."""
    started, started_cpu = time.perf_counter(), cpu_seconds()
    result = work()
    return result, PhaseTime(time.perf_counter() - started, cpu_seconds() - started_cpu)


def less(whole: PhaseTime, *parts: PhaseTime) -> PhaseTime:
    """What remains of `whole`."""
    return PhaseTime(
        whole.seconds - sum(part.seconds for part in parts),
        whole.cpu_seconds - sum(part.cpu_seconds for part in parts),
    )


def cluster_of(devices: int) -> Cluster:
    """H100 nodes of eight, or one smaller node."""
    return Cluster.parse(f"{max(1, devices // 8)}x{min(devices, 8)} H100-SXM")


def peak_rss_bytes() -> int:
    """The most memory that this process, or one of its children, held."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def row_in_own_process(name: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    """`measure` in a fresh interpreter. Raises SystemExit with its output where it fails."""
    command = [sys.executable, "-m", "benchmarks.planner", "--workload", name, "--mesh", ",".join(map(str, mesh))]
    done = subprocess.run([*command, "--json", "--here"], text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    row: dict[str, Any] = json.loads(done.stdout)["rows"][0]
    return row


def print_row(row: dict[str, Any]) -> None:
    """One row for people."""
    phases = "  ".join(f"{name} {spent['cpu_seconds']:.1f}" for name, spent in row["phases"].items())
    print(
        f"{row['workload']} {tuple(row['mesh'])}: {row['cpu_seconds']:.1f} CPU s, "
        f"{row['peak_rss_bytes'] / 2**30:.2f} GiB, {row['nodes']} nodes, {row['strategies']} strategies, "
        f"objective {row['objective_seconds'] * 1e3:.2f} ms, gap {row['gap']:.1e}\n    {phases}"
    )


def main() -> None:
    """Measure and print every combination that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=["gpt2"])
    parser.add_argument("--mesh", help="sizes of the axes, as 32,8; default: the meshes of the peers' table")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--output", type=Path, help="also write the JSON document here")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.workload:
        meshes = [tuple(map(int, arguments.mesh.split(",")))] if arguments.mesh else DEFAULT_MESHES.get(name, ((8,),))
        for mesh in meshes:
            rows.append(measure(name, mesh) if arguments.here else row_in_own_process(name, mesh))
            if not arguments.json:
                print_row(rows[-1])
    if arguments.json:
        print(json.dumps({"rows": rows}))
    if arguments.output:
        write_results(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()

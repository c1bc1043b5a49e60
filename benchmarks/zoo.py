"""The zoo: tiny configurations of real models, under the planner's own choice and under the known plans.

    python -m benchmarks.zoo
    python -m benchmarks.zoo --models gpt2 llama --world 2,4 --output benchmarks/results/zoo.json

Each row compiles a model on local gloo processes, compares loss and every gradient with the plain model (see
`benchmarks.agreement`) and says which share of the FLOPs runs replicated. Exits with 1 where one disagrees.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed
from rich.console import Console
from rich.table import Table

from autopar.api import compile as compile_model
from autopar.errors import AutoparError
from autopar.plan_text import format_mesh
from autopar.runtime.local_processes import Report, run_processes
from benchmarks.agreement import Agreement, compare, reference
from benchmarks.models import ZOO, zoo_model
from benchmarks.results import write_results

KNOWN_PLANS: dict[str, dict[str, int]] = {
    "DDP": {"dp_replicate": 4},
    "ZeRO-3": {"dp_shard": 4},
    "Megatron": {"tp": 4},
    "ZeRO-3 x Megatron": {"dp_shard": 2, "tp": 2},
}
OWN_CHOICE, NO_REPLICATION = "own choice", "no replicated compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model under one plan. `error` says why it could not run."""

    model: str
    processes: int
    plan: str
    mesh: str = ""
    agreement: Agreement | None = None
    replicated_share: float | None = None
    error: str = ""


def cases(world_size: int) -> dict[str, dict[str, Any]]:
    """Name of the plan -> arguments of `autopar.compile`."""
    found: dict[str, dict[str, Any]] = {OWN_CHOICE: {}}
    if world_size > 1:
        found[NO_REPLICATION] = {"constraints": "no_replicated_compute"}
    if world_size == 4:
        found.update({name: {"dims": dims} for name, dims in KNOWN_PLANS.items()})
    return found


def check_model(name: str, world_size: int) -> list[Row]:
    """All cases of one model on one number of processes."""
    chosen = cases(world_size)
    rows: list[Row] = []
    try:
        run_processes(_check, world_size, name, chosen, on_report=rows.append)
    except AutoparError as error:
        missing = list(chosen)[len(rows)]
        rows.append(Row(model=name, processes=world_size, plan=missing, error=str(error)))
    return rows


def _check(report: Report, name: str, chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Body of one process; rank 0 reports a row per case."""
    model, inputs = zoo_model(name)
    expected = reference(model, inputs)
    for case, arguments in chosen.items():
        try:
            compiled = compile_model(copy.deepcopy(model), inputs, **arguments)
            agreement = compare(compiled, inputs, expected)
        except AutoparError as error:
            report(Row(model=name, processes=_world_size(), plan=case, error=f"{type(error).__name__}: {error}"))
            continue
        plan = compiled.plan
        report(
            Row(
                model=name,
                processes=_world_size(),
                plan=case,
                mesh=format_mesh(dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))),
                agreement=agreement,
                replicated_share=float(plan.statistics["replicated_flops_share"]),
            )
        )


def _world_size() -> int:
    return torch.distributed.get_world_size()


def add_row(table: Table, row: Row) -> None:
    """Green where loss and gradients agree, red where not."""
    start = (row.model, str(row.processes), row.plan, row.mesh)
    found = row.agreement
    if found is None:
        table.add_row(*start, "", row.error, "", style="red")
        return
    worst = f"{found.gradient_error:.1e} of {found.allowed:.0e}" + ("" if found.agrees else f" {found.worst_parameter}")
    share = "" if row.replicated_share is None else f"{row.replicated_share:.1%}"
    table.add_row(*start, f"{found.loss_error:.1e}", worst, share, style="green" if found.agrees else "red")


def main() -> None:
    """Run the zoo, print one table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--world", default="1,2,4", help="numbers of processes")
    parser.add_argument("--output", type=Path, help="write the rows as JSON here")
    arguments = parser.parse_args()
    console = Console()
    table = Table("model", "ranks", "plan", "mesh", "loss error", "gradient error", "replicated", box=None)
    rows: list[Row] = []
    for name in arguments.models:
        for world_size in map(int, arguments.world.split(",")):
            with console.status(f"{name} on {world_size}"):
                rows += check_model(name, world_size)
    for row in rows:
        add_row(table, row)
    console.print(table)
    if arguments.output:
        write_results(arguments.output, {"rows": [asdict(row) for row in rows]})
    sys.exit(0 if all(row.agreement is not None and row.agreement.agrees for row in rows) else 1)


if __name__ == "__main__":
    main()

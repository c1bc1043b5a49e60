"""Every plan of a small graph, all measured: is the chosen one the fastest?

    python -m benchmarks.plan_quality.exhaustive

Two products and a loss on four ranks. Each weight is stored whole or split along either dim, each product's output lies
whole or split along the batch or the features: 3^4 = 81 wishes, written as constraints. What cannot be met is dropped,
wishes that end in the same plan count once, and all plans train in turn beside the free choice.

    up.weight S(0), down.weight S(1), up S(1), down R        Megatron's pair
    up.weight R,    down.weight R,    up S(0), down S(0)     data parallelism
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import autopar
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from benchmarks.netlab.lab import network_cache
from benchmarks.netlab.machine import why_unavailable
from benchmarks.netlab.processes import ended_by_signals
from benchmarks.plan_quality.bootstrap import slowdown
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.job import WARM_UP_STEPS
from benchmarks.plan_quality.measure import profiled, train
from benchmarks.plan_quality.plans import CHOSEN, predicted, same_choices
from benchmarks.plan_quality.rows import LOSS_TOLERANCE, loss_difference, measured_runs, ranking, reference_losses
from benchmarks.plan_quality.settings import SMALL, Setting
from benchmarks.results import write_results

RESULTS = Path(__file__).parents[1] / "results" / "plan_quality_exhaustive.json"
PLACEMENTS = ("R", "S(0)", "S(1)")
CONSTRAINED = ("up.weight", "down.weight", "up", "down")
STEPS, AGAIN = 5, 15


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--setting", "names", multiple=True, type=click.Choice(list(SMALL)), help="Default: all.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
def main(names: tuple[str, ...], output: Path) -> None:
    """Measure every plan of small graphs."""
    if (reason := why_unavailable()) is not None:
        raise click.ClickException(reason)
    console = Console(stderr=True)
    rows: dict[str, dict[str, Any]] = {}
    if output.exists() and names:
        rows = {row["name"]: row for row in json.loads(output.read_text())["settings"]}
    try:
        with ended_by_signals():
            for name in names or SMALL:
                rows[name] = run(name, console)
                write_results(output, {"settings": [rows[known] for known in SMALL if known in rows]})
                console.print_json(json.dumps({key: value for key, value in rows[name].items() if key != "runs"}))
    except AutoparError as error:
        raise click.ClickException(str(error)) from error


def run(name: str, console: Console) -> dict[str, Any]:
    """All plans of a small setting, measured."""
    setting = SMALL[name]
    cluster = profiled(setting.network, console)
    plans = all_plans(setting, cluster)
    console.print(f"{name}: {len(plans)} different plans")
    folder = network_cache(setting.network) / "plan_quality" / name
    shutil.rmtree(folder, ignore_errors=True)
    found = train(setting, folder, plans, {}, STEPS, AGAIN)
    captured = Captured(setting)
    said = {kind: predicted(captured, plan, cluster) for kind, plan in plans.items()}
    runs = measured_runs(found["rows"], WARM_UP_STEPS, {kind: kind for kind in plans}, said, found["peak_bytes"])
    reference = reference_losses(runs)
    chosen = next(each for each in runs if each["name"] == CHOSEN)
    against = slowdown(chosen["steps"], runs[0]["steps"])
    return {
        "name": name,
        "network": setting.network.name,
        "plans": len(plans),
        "chosen_seconds": chosen["seconds"],
        "best_seconds": runs[0]["seconds"],
        "best": runs[0]["name"],
        "median_seconds": runs[len(runs) // 2]["seconds"],
        "slowdown_to_best": against.ratio,
        "significantly_slower": runs[0] is not chosen and against.significant,
        "kendall_tau": ranking(runs),
        "wrong_losses": [r["name"] for r in runs if not loss_difference(r["losses"], reference) <= LOSS_TOLERANCE],
        "errors": found["errors"],
        "runs": runs,
    }


def all_plans(setting: Setting, cluster: Cluster) -> dict[str, Plan]:
    """The free choice on one mesh axis, and the plan of every wish that can be met, by the wish; equal ones once."""
    model, inputs = setting.model_and_inputs()
    planner = autopar.Planner(model, inputs, cluster=cluster, optimizer=torch.optim.SGD)
    mesh = (cluster.num_devices,)
    plans = {CHOSEN: planner.plan(mesh=mesh, micro_batches=1)}
    for wish in wishes():
        try:
            plan = planner.plan(mesh=mesh, micro_batches=1, constraints=wish, mode="fast")
        except AutoparError:  # these placements exclude each other
            continue
        if not any(same_choices(plan, known) for known in plans.values()):
            plans[", ".join(f"{key} {placement}" for key, placement in wish.items())] = plan
    return plans


def wishes() -> Iterator[Mapping[str, str]]:
    """Every placement of what is constrained."""
    for placements in itertools.product(PLACEMENTS, repeat=len(CONSTRAINED)):
        yield dict(zip(CONSTRAINED, placements, strict=True))


if __name__ == "__main__":
    main()

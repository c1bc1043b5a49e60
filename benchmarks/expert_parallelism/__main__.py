"""`python -m benchmarks.expert_parallelism [--setting NAME ...] [--resume]`: which way to run experts wins.

Per setting the network is profiled once, plans are made from the profile, and all ways train in turn, step by step, in
one pool of processes (`benchmarks/plan_quality/job.py`). Results are written after every setting.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError
from benchmarks.expert_parallelism.alternatives import in_words, make_plans, predicted_links, under_load
from benchmarks.expert_parallelism.by_hand import BY_HAND
from benchmarks.expert_parallelism.rows import busiest, row, summary
from benchmarks.expert_parallelism.settings import SETTINGS, SIZES_OF, measured_loads
from benchmarks.netlab.lab import network_cache
from benchmarks.netlab.machine import why_unavailable
from benchmarks.netlab.processes import ended_by_signals
from benchmarks.plan_quality.__main__ import commit
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.job import WARM_UP_STEPS
from benchmarks.plan_quality.measure import profile_age, profiled, train
from benchmarks.plan_quality.rows import measured_runs
from benchmarks.results import write_results

RESULTS = Path(__file__).parents[1] / "results" / "expert_parallelism.json"
STEPS, AGAIN = 5, 6


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--setting", "names", multiple=True, type=click.Choice(list(SETTINGS)), help="Default: all.")
@click.option("--resume", is_flag=True, help="Keep the settings that the output has.")
@click.option("--profile", "again", is_flag=True, help="Measure the networks again.")
@click.option("--steps", default=STEPS, show_default=True, help="Timed steps of every run.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
def main(names: Sequence[str], resume: bool, again: bool, steps: int, output: Path) -> None:
    """Train mixtures of experts in every way, on emulated clusters."""
    if (reason := why_unavailable()) is not None:
        raise click.ClickException(reason)
    console = Console(stderr=True, width=160)
    rows = {found["name"]: found for found in json.loads(output.read_text())["settings"]} if output.exists() else {}
    asked = [name for name in names or SETTINGS if not (resume and name in rows)]
    for network in {SETTINGS[name].network.name: SETTINGS[name].network for name in asked}.values():
        if again:
            shutil.rmtree(network_cache(network) / "clusters", ignore_errors=True)
    with ended_by_signals():
        for name in asked:
            try:
                rows[name] = run(name, steps, console)
            except AutoparError as error:  # the others are worth running
                console.print(f"{name}: {error}", style="red", markup=False)
                continue
            ordered = [rows[known] for known in SETTINGS if known in rows]
            write_results(output, {"summary": summary(ordered), "settings": ordered})
            console.print(row_table(rows[name]))


def run(name: str, steps: int, console: Console) -> dict[str, Any]:
    """Plan, train and compare a setting."""
    setting, began, load = SETTINGS[name], time.perf_counter(), os.getloadavg()[0]
    cluster, loads = profiled(setting.network, console), measured_loads(SIZES_OF[name])
    known = loads if SIZES_OF[name].exponent else []
    plans, left_out = make_plans(setting, cluster, known)
    captured = Captured(setting)
    said = {kind: predicted_links(captured, under_load(plan, known), cluster) for kind, plan in plans.items()}
    folder = network_cache(setting.network) / "expert_parallelism" / name
    shutil.rmtree(folder, ignore_errors=True)
    planned = time.perf_counter()
    found = train(setting, folder, plans, BY_HAND, steps, AGAIN)
    words = {kind: in_words(plan) for kind, plan in plans.items()}
    words |= {kind: baseline.plan for kind, baseline in BY_HAND.items()}
    runs = measured_runs(found["rows"], WARM_UP_STEPS, words, said, found["peak_bytes"])
    return {
        "name": name,
        "network": setting.network.name,
        "commit": commit(),
        "load_before": round(load, 2),
        "profile_age_hours": round(profile_age(setting.network) / 3600.0, 1),
        "elapsed_seconds": {"planning": planned - began, **found["elapsed"]},
        **row(
            runs, {**left_out, **found["errors"]}, loads, setting.network.num_ranks, "measured" if known else "uniform"
        ),
    }


def row_table(found: Mapping[str, Any]) -> Table:
    """The runs of a setting, fastest first."""
    table = Table(title=f"{found['name']} on {found['network']}: seconds of a step, MB on all links and on the busiest")
    for header in ("run", "plan", "measured", "predicted", "CPU s", "MB", "predicted", "busiest", "predicted"):
        table.add_column(header)
    for each in found["runs"]:
        said, links = each["predicted"], each["link_bytes"]
        table.add_row(
            each["name"],
            each["plan"],
            f"{each['seconds']:.3f}",
            f"{said['seconds']:.3f}" if said else "",
            f"{each['cpu_seconds']:.3f}",
            f"{sum(map(sum, links)) / 1e6:.2f}",
            f"{sum(map(sum, said['link_bytes'])) / 1e6:.2f}" if said else "",
            f"{busiest(links) / 1e6:.2f}",
            f"{busiest(said['link_bytes']) / 1e6:.2f}" if said else "",
        )
    return table


if __name__ == "__main__":
    main()

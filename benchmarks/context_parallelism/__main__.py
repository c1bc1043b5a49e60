"""`python -m benchmarks.context_parallelism [--setting NAME ...] [--resume]`: which split of a sequence wins.

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
from autopar.hardware.cluster import Cluster
from benchmarks.context_parallelism.alternatives import in_words, make_plans, predicted_waits
from benchmarks.context_parallelism.by_hand import BY_HAND
from benchmarks.context_parallelism.closed_forms import attention_rate, closed_forms
from benchmarks.context_parallelism.rows import row, summary, with_waits
from benchmarks.context_parallelism.settings import SETTINGS, SIZES_OF
from benchmarks.netlab.lab import network_cache
from benchmarks.netlab.machine import why_unavailable
from benchmarks.netlab.processes import ended_by_signals
from benchmarks.plan_quality.__main__ import commit
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.job import WARM_UP_STEPS
from benchmarks.plan_quality.measure import profile_age, profiled, train
from benchmarks.plan_quality.rows import measured_runs
from benchmarks.results import write_results

RESULTS = Path(__file__).parents[1] / "results" / "context_parallelism.json"
STEPS, AGAIN = 5, 6


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--setting", "names", multiple=True, type=click.Choice(list(SETTINGS)), help="Default: all.")
@click.option("--resume", is_flag=True, help="Keep the settings that the output has.")
@click.option("--profile", "again", is_flag=True, help="Measure the networks again.")
@click.option("--steps", default=STEPS, show_default=True, help="Timed steps of every run.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
def main(names: Sequence[str], resume: bool, again: bool, steps: int, output: Path) -> None:
    """Train a decoder under every way to split its sequence, on emulated clusters."""
    if (reason := why_unavailable()) is not None:
        raise click.ClickException(reason)
    console = Console(stderr=True)
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
    cluster = profiled(setting.network, console)
    plans, left_out = make_plans(setting, cluster)
    captured = Captured(setting)
    said = {kind: predicted_waits(captured, plan, cluster) for kind, plan in plans.items()}
    folder = network_cache(setting.network) / "context_parallelism" / name
    shutil.rmtree(folder, ignore_errors=True)
    planned = time.perf_counter()
    found = train(setting, folder, plans, BY_HAND, steps, AGAIN)
    words = {kind: in_words(plan) for kind, plan in plans.items()}
    words |= {kind: baseline.plan for kind, baseline in BY_HAND.items()}
    runs = [
        with_waits(each, found["rows"][each["name"]][WARM_UP_STEPS:])
        for each in measured_runs(found["rows"], WARM_UP_STEPS, words, said, found["peak_bytes"])
    ]
    return {
        "name": name,
        "network": setting.network.name,
        "commit": commit(),
        "load_before": round(load, 2),
        "profile_age_hours": round(profile_age(setting.network) / 3600.0, 1),
        "elapsed_seconds": {"planning": planned - began, **found["elapsed"]},
        **row(runs, {**left_out, **found["errors"]}, on_paper(name, cluster)),
    }


def on_paper(name: str, cluster: Cluster) -> dict[str, Any]:
    """The closed forms of a setting."""
    sizes, network, rate = SIZES_OF[name], SETTINGS[name].network, attention_rate(cluster)
    forms = {
        order: closed_forms(sizes, network, rate, zigzag=order == "zigzag").said() for order in ("contiguous", "zigzag")
    }
    return {"attention_flops_per_second": rate, **forms}


def row_table(found: Mapping[str, Any]) -> Table:
    """The runs of a setting, fastest first."""
    table = Table(title=f"{found['name']} on {found['network']}: seconds of a step, of waiting, MB on the links")
    for header in ("run", "plan", "measured", "predicted", "waited", "predicted", "MB", "predicted"):
        table.add_column(header)
    for each in found["runs"]:
        said = each["predicted"]
        table.add_row(
            each["name"],
            each["plan"],
            f"{each['seconds']:.3f}",
            f"{said['seconds']:.3f}" if said else "",
            f"{each['exposed_communication_seconds']:.3f}" if said else "",
            f"{said['awaited_seconds']:.3f}" if said else "",
            f"{sum(map(sum, each['link_bytes'])) / 1e6:.2f}",
            f"{sum(said['sent_bytes']) / 1e6:.2f}" if said and said["sent_bytes"] else "",
        )
    return table


if __name__ == "__main__":
    main()

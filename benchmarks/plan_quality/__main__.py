"""`python -m benchmarks.plan_quality [--json] [--quick] [--resume] [--setting NAME ...]`: who wins, measured.

Per setting: the network is profiled once (`autopar profile` on the emulated cluster), our plans are made from that
profile, and they and the baselines train in turn in one pool of processes. Results are written after every setting.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from benchmarks.netlab.lab import network_cache
from benchmarks.netlab.machine import why_unavailable
from benchmarks.netlab.processes import ended_by_signals
from benchmarks.plan_quality.baselines import BASELINES
from benchmarks.plan_quality.job import WARM_UP_STEPS
from benchmarks.plan_quality.measure import profiled, train
from benchmarks.plan_quality.plans import describe, make_plans, predicted
from benchmarks.plan_quality.rows import measured_runs, setting_row
from benchmarks.plan_quality.settings import QUICK, SETTINGS, Setting
from benchmarks.plan_quality.summary import summary
from benchmarks.results import write_results

RESULTS = Path(__file__).parents[1] / "results" / "plan_quality.json"
STEPS, AGAIN = 5, 6


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--quick", is_flag=True, help=f"Only {', '.join(QUICK)}.")
@click.option("--resume", is_flag=True, help="Keep the settings that the output has.")
@click.option("--setting", "names", multiple=True, type=click.Choice(list(SETTINGS)), help="Default: all settings.")
@click.option("--profile", "again", is_flag=True, help="Measure the networks again.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
def main(as_json: bool, quick: bool, resume: bool, names: Sequence[str], again: bool, output: Path) -> None:
    """Train every plan, ours and everybody else's, on emulated clusters, and print who wins."""
    if (reason := why_unavailable()) is not None:
        raise click.ClickException(reason)
    console = Console(stderr=True)
    asked = names or (QUICK if quick else tuple(SETTINGS))
    rows = known_rows(output) if resume else {}
    if again:
        for name in asked:
            shutil.rmtree(network_cache(SETTINGS[name].network) / "clusters", ignore_errors=True)
    failed = []
    with ended_by_signals():
        for name in asked:
            try:
                if name not in rows:
                    rows[name] = run(name, profiled(SETTINGS[name].network, console), console)
                    write_results(output, content(rows))
                console.print(row_table(rows[name]))
            except AutoparError as error:  # the others are worth running; --resume comes back to this one
                failed.append(name)
                console.print(f"{name}: {error}", style="red")
    if as_json:
        print(json.dumps(content(rows)))
    if failed:
        raise click.ClickException(f"no results of {', '.join(failed)}")


def known_rows(output: Path) -> dict[str, dict[str, Any]]:
    """What earlier runs have measured, by setting."""
    return {row["name"]: row for row in json.loads(output.read_text())["settings"]} if output.exists() else {}


def content(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The document, settings in the order of the table."""
    ordered = [rows[name] for name in SETTINGS if name in rows]
    return {"summary": summary(ordered), "settings": ordered}


def run(name: str, cluster: Cluster, console: Console) -> dict[str, Any]:
    """Plan a setting, train all plans, and compare."""
    setting = SETTINGS[name]
    console.print(f"{name}: planning")
    plans, left_out = make_plans(setting, cluster, console.print)
    usable, reasons = usable_baselines(setting)
    folder = network_cache(setting.network) / "plan_quality" / name
    shutil.rmtree(folder, ignore_errors=True)
    found = train(name, setting.network, folder, plans, usable, STEPS, AGAIN)
    words = {kind: describe(plan) for kind, plan in plans.items()} | {kind: BASELINES[kind].plan for kind in usable}
    said = {kind: predicted(setting, plan, cluster) for kind, plan in plans.items()}
    runs = measured_runs(found["rows"], WARM_UP_STEPS, words, said, found["peak_bytes"])
    return setting_row(name, setting.network.name, runs, left_out | reasons | found["errors"])


def usable_baselines(setting: Setting) -> tuple[list[str], dict[str, str]]:
    """The baselines that this model can be expressed in, and the reasons of the others."""
    model, _ = setting.model_and_inputs()
    reasons = {name: baseline.why_not(model) for name, baseline in BASELINES.items()}
    return [name for name, why in reasons.items() if why is None], {n: why for n, why in reasons.items() if why}


def row_table(row: Mapping[str, Any]) -> Table:
    """The runs of a setting, fastest first."""
    table = Table(title=f"{row['name']} on {row['network']}: seconds of a step")
    for header in ("run", "plan", "measured", "predicted", "MB sent", "MB predicted"):
        table.add_column(header)
    for each in row["runs"]:
        said = each["predicted"] or {}
        sent = said.get("sent_bytes")
        table.add_row(
            each["name"],
            each["plan"],
            f"{each['seconds']:.3f}",
            f"{said['seconds']:.3f}" if said else "",
            f"{sum(map(sum, each['link_bytes'])) / 1e6:.2f}",
            "" if sent is None else f"{sum(sent) / 1e6:.2f}",
        )
    return table


if __name__ == "__main__":
    main()

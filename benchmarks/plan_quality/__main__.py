"""`python -m benchmarks.plan_quality [--json] [--quick] [--resume] [--setting NAME ...]`: who wins, measured.

Networks are profiled (`autopar profile` on the emulated cluster) and our plans made from those profiles first, unless
that is done (`planned.py`). Then, setting by setting, they and the baselines train in turn in one pool of processes.
Results are written after every setting; a run that was ended goes on with --resume.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from benchmarks.netlab.lab import network_cache
from benchmarks.netlab.machine import why_unavailable
from benchmarks.netlab.processes import ended_by_signals
from benchmarks.plan_quality.baselines import BASELINES, Baseline
from benchmarks.plan_quality.job import WARM_UP_STEPS
from benchmarks.plan_quality.measure import profile_age, profiled, train
from benchmarks.plan_quality.planned import Planned, load, make_missing
from benchmarks.plan_quality.plans import describe
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
@click.option("--prepare", is_flag=True, help="Only profile the networks and make the plans.")
@click.option("--steps", default=STEPS, show_default=True, help="Timed steps of every run; slow ones have fewer.")
@click.option("--baselines", is_flag=True, help="Only the baselines, against each other; no results are written.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
def main(
    as_json: bool,
    quick: bool,
    resume: bool,
    names: Sequence[str],
    again: bool,
    prepare: bool,
    steps: int,
    baselines: bool,
    output: Path,
) -> None:
    """Train every plan, ours and everybody else's, on emulated clusters, and print who wins."""
    if (reason := why_unavailable()) is not None:
        raise click.ClickException(reason)
    console = Console(stderr=True)
    asked = names or (QUICK if quick else tuple(SETTINGS))
    rows = known_rows(output) if resume else {}
    if again:
        for name in asked:
            shutil.rmtree(network_cache(SETTINGS[name].network) / "clusters", ignore_errors=True)
    wanted = [name for name in asked if name not in rows]
    with ended_by_signals():
        if baselines:
            for name in asked:
                console.print(run_baselines(name, steps))
            return
        clusters, failed = prepared(wanted, console)
        if not prepare:
            failed |= measured(
                {name: clusters[name] for name in wanted if name in clusters}, rows, steps, output, console
            )
    for name in asked:
        if name in rows:
            console.print(row_table(rows[name]))
    if as_json:
        print(json.dumps(content(rows)))
    if failed:
        raise click.ClickException("\n".join(f"no results of {name}: {reason}" for name, reason in failed.items()))


def prepared(names: Sequence[str], console: Console) -> tuple[dict[str, Cluster], dict[str, str]]:
    """The clusters of the settings whose plans are made, and the reasons of those that have none."""
    networks = {SETTINGS[name].network.name: SETTINGS[name].network for name in names}
    profiles = {network: profiled(each, console) for network, each in networks.items()}
    clusters = {name: profiles[SETTINGS[name].network.name] for name in names}
    with timed("planning of all settings", console):
        failed = make_missing(clusters, console)
    return {name: cluster for name, cluster in clusters.items() if name not in failed}, failed


def measured(
    clusters: Mapping[str, Cluster], rows: dict[str, dict[str, Any]], steps: int, output: Path, console: Console
) -> dict[str, str]:
    """Train the settings, write each into `rows` and the output once it is done; setting -> why it has no row."""
    failed = {}
    for name, cluster in clusters.items():
        try:
            with timed(name, console):
                rows[name] = run(name, load(name, cluster), steps)
            write_results(output, content(rows))
        except AutoparError as error:  # the others are worth running; --resume comes back to this one
            failed[name] = str(error)
            console.print(f"{name}: {error}", style="red", markup=False)
    return failed


def known_rows(output: Path) -> dict[str, dict[str, Any]]:
    """What earlier runs have measured, by setting."""
    return {row["name"]: row for row in json.loads(output.read_text())["settings"]} if output.exists() else {}


def content(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The document, settings in the order of the table."""
    ordered = [rows[name] for name in SETTINGS if name in rows]
    command = ["python -m benchmarks.plan_quality", *sys.argv[1:]]
    return {"run": {"command": " ".join(command)}, "summary": summary(ordered), "settings": ordered}


def commit() -> str | None:
    """What is checked out; None outside of a repository."""
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return said.stdout.strip() or None


def run(name: str, planned: Planned, steps: int) -> dict[str, Any]:
    """Train all plans of a setting, and compare."""
    setting, began = SETTINGS[name], time.perf_counter()
    usable, reasons = usable_baselines(setting)
    found = train(setting, setting_folder(name), planned.plans, usable, steps, AGAIN)
    words = {kind: describe(plan) for kind, plan in planned.plans.items()}
    words |= {kind: baseline.plan for kind, baseline in usable.items()}
    runs = measured_runs(found["rows"], WARM_UP_STEPS, words, planned.predicted, found["peak_bytes"])
    elapsed = {"planning": planned.seconds, **found["elapsed"], "in the lab": time.perf_counter() - began}
    row = setting_row(name, setting.network.name, runs, {**planned.left_out, **reasons, **found["errors"]}, elapsed)
    return row | {"profile_age_hours": round(profile_age(setting.network) / 3600.0, 1), "commit": commit()}


def run_baselines(name: str, steps: int) -> Table:
    """The baselines against each other, from which settings are chosen; nothing is planned and nothing is kept."""
    setting = SETTINGS[name]
    usable, _ = usable_baselines(setting)
    found = train(setting, setting_folder(name), {}, usable, steps, 0)
    words = {kind: baseline.plan for kind, baseline in usable.items()}
    runs = measured_runs(found["rows"], WARM_UP_STEPS, words, {}, {})
    return row_table({"name": name, "network": setting.network.name, "runs": runs})


@contextlib.contextmanager
def timed(what: str, console: Console) -> Iterator[None]:
    """Print how long it took."""
    began = time.perf_counter()
    yield
    console.print(f"{what} took {time.perf_counter() - began:.0f} s")


def setting_folder(name: str) -> Path:
    """A new folder for what the ranks of a setting read and write; what an earlier run left there is removed."""
    folder = network_cache(SETTINGS[name].network) / "plan_quality" / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def usable_baselines(setting: Setting) -> tuple[dict[str, Baseline], dict[str, str]]:
    """The baselines that this model can be expressed in, and the reasons of the others."""
    model, _ = setting.model_and_inputs()
    reasons = {name: baseline.why_not(model) for name, baseline in BASELINES.items()}
    usable = {name: BASELINES[name] for name, why in reasons.items() if why is None}
    return usable, {name: why for name, why in reasons.items() if why}


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

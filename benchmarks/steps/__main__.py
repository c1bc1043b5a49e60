"""Predicted beside measured steps: `python -m benchmarks.steps [--only NAME ...] [--world 1 2 4] [--output FILE]`.

Every row trains one small model on `world` gloo processes of one thread under the plan that autopar chooses with the
profile of this machine (`autopar profile`), and compares the step's seconds and peak bytes with the prediction.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from autopar.runtime.calibration.measure_machine import calibrate
from benchmarks.results import write_results
from benchmarks.steps.models import MODELS
from benchmarks.workers import Pool, WorkerError

ROW_SECONDS = 240.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice(list(MODELS)), help="Default: all models.")
@click.option("--world", multiple=True, type=click.IntRange(1, 4), default=(1, 2, 4), show_default=True)
@click.option("--steps", default=15, show_default=True, type=click.IntRange(min=3), help="Timed steps of a row.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where the rows are written.")
def main(only: Sequence[str], world: Sequence[int], steps: int, as_json: bool, output: Path | None) -> None:
    """Train small models on this machine and compare their steps with the prediction."""
    console = Console(stderr=as_json)
    profile = calibrate()
    console.print(f"profile of {profile.name}, {profile.date}")
    rows = []
    pool = Pool(max(world), preload=["autopar", "transformers", "benchmarks.steps.models"])
    try:
        for name in only or MODELS:
            for world_size in world:
                rows.append(_row(pool, name, world_size, steps))
                console.print(_line(rows[-1]))
    finally:
        pool.close()
    found = summary(rows)
    content = {"rows": rows, "summary": found}
    console.print(_table(found))
    if as_json:
        print(json.dumps(content))
    if output is not None:
        write_results(output, content)


def _row(pool: Pool, name: str, world_size: int, steps: int) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "world_size": world_size}
    try:
        found = pool.run(
            "benchmarks.steps.job:run", world_size=world_size, timeout=ROW_SECONDS, name=name, dims=None, steps=steps
        )[0]
    except WorkerError as error:
        return {**row, "error": str(error).strip().splitlines()[-1]}
    row.update(found)
    if world_size == 1:
        row["plain"] = pool.run(
            "benchmarks.steps.job:plain", world_size=1, timeout=ROW_SECONDS, name=name, steps=steps
        )[0]
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median absolute error of time and memory, and the mean log bias of time, per number of processes and over all."""
    done = [row for row in rows if "error" not in row]
    groups = {"all": done}
    for world_size in sorted({row["world_size"] for row in done}):
        groups[str(world_size)] = [row for row in done if row["world_size"] == world_size]
    return {
        name: {
            "rows": len(group),
            "median_time_error": statistics.median(_error(r, "predicted_seconds", "step_seconds") for r in group),
            "median_memory_error": statistics.median(_error(r, "predicted_peak_bytes", "peak_bytes") for r in group),
            "median_ratio_predicted_to_measured": statistics.median(
                r["predicted_seconds"] / r["step_seconds"] for r in group
            ),
        }
        for name, group in groups.items()
        if group
    }


def _error(row: dict[str, Any], predicted: str, measured: str) -> float:
    return abs(float(row[predicted]) / float(row[measured]) - 1.0)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['model']:12} x{row['world_size']}  {row['error']}"
    return (
        f"{row['model']:12} x{row['world_size']}  predicted {row['predicted_seconds'] * 1e3:7.1f} ms, "
        f"measured {row['step_seconds'] * 1e3:7.1f} ms (forward {row['forward_seconds'] * 1e3:.1f}, "
        f"backward {row['backward_seconds'] * 1e3:.1f}, optimizer {row['optimizer_seconds'] * 1e3:.1f}); "
        f"memory {row['predicted_peak_bytes'] / 2**20:.1f} of {row['peak_bytes'] / 2**20:.1f} MiB"
    )


def _table(found: dict[str, dict[str, float]]) -> Table:
    table = Table(title="predicted against measured")
    for header in ("processes", "rows", "time error", "predicted / measured", "memory error"):
        table.add_column(header, justify="right")
    for name, numbers in found.items():
        table.add_row(
            name,
            str(int(numbers["rows"])),
            f"{numbers['median_time_error']:.1%}",
            f"{numbers['median_ratio_predicted_to_measured']:.2f}",
            f"{numbers['median_memory_error']:.1%}",
        )
    return table


if __name__ == "__main__":
    main()

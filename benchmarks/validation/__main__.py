"""How wrong the cost models are: predicted against published measurements, kind by kind.

    python -m benchmarks.validation --data FOLDER                              one table of every kind and tier
    python -m benchmarks.validation --data FOLDER --kind step --json           some kinds, as JSON
    python -m benchmarks.validation rungs --data FOLDER                        rows of recomputation and offloading
    python -m benchmarks.validation predict --kind op --rows IN.csv --out OUT.csv --tier t1

Tiers: t0 knows hardware presets and constants fitted across devices; t1 constants of that device type too; physics is
the ablation without any fitted constant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from autopar.errors import ConfigurationError
from benchmarks.faults.__main__ import commit
from benchmarks.results import document, write_results
from benchmarks.validation.data import folder, read_table
from benchmarks.validation.predict import predict_table, write_predictions
from benchmarks.validation.report import as_json, as_table
from benchmarks.validation.rung_rows import rungs_document
from benchmarks.validation.schemas import KINDS, Kind, Tier
from benchmarks.validation.score import score_all

RESULTS = Path(__file__).parents[1] / "results" / "validation.json"


@contextmanager
def _progress(title: str, rows: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr that hears how many rows are done; one line where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        click.echo(f"{title}: {rows} rows", err=True)
        yield lambda done: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=rows)
        yield lambda done: bar.update(task, completed=done)


@click.group(invoke_without_command=True, help=__doc__)
@click.option("--data", type=click.Path(path_type=Path), help="Folder of measurements; else $AUTOPAR_GROUNDTRUTH.")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Only these kinds.")
@click.option("--json", "to_json", is_flag=True, help="JSON on stdout in place of the table.")
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON is kept; else in benchmarks/results.")
@click.pass_context
def main(
    context: click.Context, data: Path | None, kinds: tuple[Kind, ...], to_json: bool, output: Path | None
) -> None:
    if context.invoked_subcommand is not None:
        return
    scores = score_all(folder(data), kinds or KINDS, _progress)
    content = as_json(scores, sys.argv[1:])
    kept = output or (None if kinds else RESULTS)
    if kept is not None:
        write_results(kept, content)
    click.echo(json.dumps(document(content), indent=1) if to_json else as_table(scores))


@main.command()
@click.option("--kind", type=click.Choice(KINDS), required=True, help="Which measured columns are predicted.")
@click.option("--rows", type=click.Path(path_type=Path), required=True, help="CSV of a known kind of file.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where rows and predictions are written.")
@click.option("--tier", type=click.Choice(["t0", "t1", "physics"]), default="t1", show_default=True)
def predict(kind: Kind, rows: Path, out: Path, tier: Tier) -> None:
    """Predict every row of a CSV; its measured columns may be absent and are never read."""
    table = read_table(rows, kind)
    with _progress(f"{table.schema.name}, {kind}, {tier}", len(table.rows)) as progress:
        predictions = predict_table(table, kind, tier, progress)
    write_predictions(out, table, kind, predictions)
    refused = [predicted for predicted in predictions if not predicted.values]
    click.echo(f"{len(predictions) - len(refused)} of {len(predictions)} rows predicted: {out}", err=True)


@main.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder of measurements; else $AUTOPAR_GROUNDTRUTH.")
@click.option("--tier", type=click.Choice(["t0", "t1", "physics"]), default="t0", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS.with_name("rungs.json"))
def rungs(data: Path | None, tier: Tier, output: Path) -> None:
    """Predict the rows that tell what recomputing and offloading cost, one by one."""
    content = rungs_document(folder(data), tier)
    command = f"python -m benchmarks.validation rungs --data FOLDER --tier {tier}"
    write_results(output, {"command": command, "commit": commit(), **content})
    click.echo(json.dumps(content["scores"], indent=1))


def _main() -> None:
    try:
        main()
    except ConfigurationError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    _main()

"""Emitted steps beside their plans: `python -m benchmarks.fake_cuda [--only NAME ...] [--zoo] [--output FILE]`.

Every row plans a model for H100s and runs what one rank would run, forward, backward and AdamW, on fake CUDA tensors.
`--stages`: pipelines, a row for the ranks of each stage. `--add` keeps the rows that a file already has and replaces
those of the same models.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.fake_cuda.cases import LARGE, STAGES, Case, rows, zoo
from benchmarks.results import write_results

COMMAND = "python -m benchmarks.fake_cuda [--zoo | --stages] --add --output FILE"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, help="Names of models; default: all that are large.")
@click.option("--zoo", "with_zoo", is_flag=True, help="The models of the zoo.")
@click.option("--stages", "with_stages", is_flag=True, help="Pipelines.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option("--add", is_flag=True, help="Keep the other rows of the output.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where the rows are written.")
def main(only: Sequence[str], with_zoo: bool, with_stages: bool, as_json: bool, add: bool, output: Path | None) -> None:
    """Run emitted steps on fake CUDA tensors and compare them with their plans."""
    every_case = zoo() if with_zoo else STAGES.values() if with_stages else LARGE.values()
    cases = [case for case in every_case if not only or case.name in only]
    console = Console(stderr=True, width=200)
    kept = json.loads(output.read_text())["rows"] if add and output is not None and output.exists() else []
    found: list[dict[str, Any]] = []
    for case in cases:
        for each in _rows_or_error(case):
            found.append({**each, "commit": _commit()})
            console.print(_line(each), markup=False)
        if output is not None:
            names = {_key(each) for each in found}
            every = [each for each in kept if _key(each) not in names] + found
            write_results(output, {"summary": _summaries(every), "rows": every, "command": COMMAND})
    if as_json:
        print(json.dumps(found))


def _key(each: dict[str, Any]) -> tuple[str, str]:
    return each["model"], each["cluster"]


def _rows_or_error(case: Case) -> Iterator[dict[str, Any]]:
    try:
        yield from rows(case)
    except Exception as error:  # of whatever class: it is what the rows look for
        yield {
            "model": case.name,
            "cluster": case.cluster,
            "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:300],
        }


def _summaries(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`summary` of every set of cases."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for each in rows:
        name, cluster = _key(each)
        of = "stages" if name in STAGES else "large" if name in LARGE and cluster == LARGE[name].cluster else "zoo"
        sets.setdefault(of, []).append(each)
    return {name: summary(found) for name, found in sets.items()}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many rows ran, are as planned, and hold the planned bytes within 2 %."""
    ran = [each for each in rows if "error" not in each]
    shares = sorted(each["peak_bytes"]["run_of_planned"] for each in ran)
    return {
        "rows": len(rows),
        "ran": len(ran),
        "as_planned": sum(not each["faults"] for each in ran),
        "peak_within_2_percent": sum(abs(share - 1.0) <= 0.02 for share in shares),
        "step_within_2_percent": sum(abs(each["step_bytes"]["run_of_planned"] - 1.0) <= 0.02 for each in ran),
        "run_of_planned_peak": [shares[0], shares[-1]] if shares else [],
    }


def _line(each: dict[str, Any]) -> str:
    if "error" in each:
        return f"{each['model']}: {each['error']}"
    step, peak = each["step_bytes"], each["peak_bytes"]
    return (
        f"{each['model']} rank {each['rank']}: {each['mesh']}, {each['micro_batches']} micro-batches, "
        f"{each['kernels']} kernels, step "
        f"{step['run'] / 2**20:.2f} MiB ({step['run_of_planned']:.4f}), peak {peak['run'] / 2**20:.2f} MiB "
        f"({peak['run_of_planned']:.4f})" + "".join(f"\n    {fault}" for fault in each["faults"])
    )


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()

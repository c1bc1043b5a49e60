"""Every fault, a row each: what was done, what became of it, and how long that took.

    python -m benchmarks.faults                                       # all rows, as a table
    python -m benchmarks.faults --only batches/ --processes 2         # rows by name
    python -m benchmarks.faults --json benchmarks/results/faults.json # also as a document; "-": on stdout, no table
    python -m benchmarks.faults --again benchmarks/results/faults.json --json benchmarks/results/faults.json
                                                                      # rows that were bad there, and new ones
    python -m benchmarks.faults --list
    python -m benchmarks.faults --cost                                # CPU seconds and bytes of the guards instead

Exits with 1 where a row is neither right nor refused with what must be named, or the guards cost too much.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.faults.acting import faults_of
from benchmarks.faults.fault import Fault
from benchmarks.faults.fault_runner import FaultRow, run_faults, warm_templates
from benchmarks.faults.guard_cost import WORLDS, measured_cost
from benchmarks.results import document, write_results

MODULES = tuple(
    f"benchmarks.faults.{name}"
    for name in (
        "launching",
        "weights",
        "batches",
        "state",
        "hooks",
        "gradients",
        "checkpoints",
        "resuming",
        "lost_ranks",
        "sizes",
        "trust",
        "outputs",
        "input_files",
        "arguments",
        "usage",
        "odd_values",
    )
)
ROOT = Path(__file__).resolve().parents[2]


def chosen(faults: Sequence[Fault], only: str | None, processes: int | None) -> list[Fault]:
    """Those whose name holds the pattern, on as many processes."""
    return [
        each for each in faults if (only is None or re.search(only, each.name)) and processes in (None, each.processes)
    ]


def table_of(rows: Sequence[FaultRow]) -> Table:
    """One line per row."""
    table = Table("point", "fault", "processes", "verdict", "s", "what happened", box=None)
    for row in rows:
        table.add_row(
            str(row.point), row.name, str(row.processes), row.verdict, f"{row.seconds:.1f}", escape(row.happened[:300]),
            style="green" if row.good else "red",
        )  # fmt: skip
    return table


def summary_of(rows: Sequence[FaultRow]) -> dict[str, Any]:
    """Rows by verdict, by point and by number of processes."""
    points = sorted({row.point for row in rows})
    return {
        "rows": len(rows),
        "good": sum(row.good for row in rows),
        "verdicts": dict(Counter(row.verdict for row in rows).most_common()),
        "processes": {str(n): count for n, count in sorted(Counter(row.processes for row in rows).items())},
        "good_by_point": {
            str(point): f"{sum(r.good for r in rows if r.point == point)}/{sum(r.point == point for r in rows)}"
            for point in points
        },
        "longest_seconds": max((row.seconds for row in rows), default=0.0),
        "lost": sum(bool(row.lost) for row in rows),
    }


def commit() -> str:
    """Of this working tree, with a mark where it was changed since."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def good_before(document: dict[str, Any], names: Sequence[str]) -> dict[str, FaultRow]:
    """The good rows of earlier results that are still among these names."""
    fields = set(FaultRow.__dataclass_fields__)
    rows = [FaultRow(**{key: each[key] for key in each.keys() & fields}) for each in document.get("rows", [])]
    return {row.name: row for row in rows if row.good and row.name in names}


def show(content: dict[str, Any], output: str | None) -> None:
    """The document into a file, or on stdout where that is "-"."""
    found = {"commit": commit(), "command": ["python", "-m", "benchmarks.faults", *sys.argv[1:]], **content}
    if output == "-":
        print(json.dumps(document(found), indent=1))
    elif output is not None:
        write_results(Path(output), found)


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="a regular expression in the names of rows")
    parser.add_argument("--processes", type=int, choices=(1, 2, 4), help="rows on as many processes")
    parser.add_argument("--again", metavar="FILE", type=Path, help="rows that are bad or absent in these results")
    parser.add_argument("--list", action="store_true", help="names and sentences, nothing is run")
    parser.add_argument("--cost", action="store_true", help="what the guards cost; no fault is made")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help='the document; "-": on stdout')
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    console = Console(stderr=arguments.json == "-", width=200)
    if arguments.cost:
        cost = measured_cost()
        console.print_json(data=cost)
        show({"cost": cost}, arguments.json)
        sys.exit(0 if all(cost[f"processes_{world}"]["cheap"] for world in WORLDS) else 1)
    faults = chosen(list(faults_of(MODULES).values()), arguments.only, arguments.processes)
    before = {} if arguments.again is None else json.loads(arguments.again.read_text())
    kept = good_before(before, [each.name for each in faults])
    faults = [each for each in faults if each.name not in kept]
    if arguments.list:
        for each in faults:
            console.print(f"{each.point:3} {each.name}: {each.does}; expected: {each.expected}", markup=False)
        return

    def tell(row: FaultRow) -> None:
        console.print(f"{row.verdict:24} {row.seconds:6.1f} s  {row.name}: {row.happened[:160]}", markup=False)

    rows = [*kept.values(), *run_faults(faults, MODULES, warm_templates(MODULES), tell)]
    again = {"again": {"rows": len(faults), "kept_of": before["commit"]}} if before else {}
    show({**again, "summary": summary_of(rows), "rows": [row.as_json() for row in rows]}, arguments.json)
    if arguments.json != "-":
        console.print(table_of([row for row in rows if not row.good]))
    console.print_json(data=summary_of(rows))
    sys.exit(0 if all(row.good for row in rows) else 1)


if __name__ == "__main__":
    main()

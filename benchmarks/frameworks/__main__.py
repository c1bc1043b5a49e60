"""Every row: a feature of a framework on two processes, beside the framework alone on one.

    python -m benchmarks.frameworks                                           # all rows, as a table
    python -m benchmarks.frameworks --only trainer/ --json -                  # rows by name; "-": on stdout, no table
    python -m benchmarks.frameworks --json benchmarks/results/frameworks.json # also as a document, written row by row
    python -m benchmarks.frameworks --resume FILE --json FILE                 # rows that were bad there, and new ones
    python -m benchmarks.frameworks --list

A framework whose package is not installed has no rows: pip install 'autopar[accelerate,lightning,peft,torchao]'.
Exits with 1 where a row neither works nor is refused by name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.faults.__main__ import commit
from benchmarks.frameworks.agreements import LOOSE
from benchmarks.frameworks.framework_row import PROCESSES, FrameworkRow
from benchmarks.frameworks.row_job import NEEDS, rows_of
from benchmarks.frameworks.row_runner import RanRow, pool_for, run_rows
from benchmarks.results import document, write_results

PACKAGES = ("accelerate", "lightning", "peft", "torchao")


def all_rows(only: str | None) -> list[FrameworkRow]:
    """Those of installed frameworks whose name holds the pattern."""
    rows = [each for framework in NEEDS for each in rows_of(framework)]
    return [each for each in rows if only is None or re.search(only, each.name)]


def good_before(found: dict[str, Any], names: Sequence[str]) -> dict[str, RanRow]:
    """The good rows of earlier results that are still among these names."""
    fields = RanRow.__dataclass_fields__.keys()
    rows = [RanRow(**{key: each[key] for key in fields}) for each in found.get("rows", []) if fields <= each.keys()]
    return {row.name: row for row in rows if row.good and row.name in names}


def content_of(rows: Sequence[RanRow], kept_of: str | None) -> dict[str, Any]:
    """The document of these rows."""
    tight = [row for row in rows if row.good and row.precision not in LOOSE]
    return {
        "commit": commit(),
        "command": ["python", "-m", "benchmarks.frameworks", *sys.argv[1:]],
        "packages": {name: version(name) for name in PACKAGES if find_spec(name)},
        "processes": PROCESSES,
        **({} if kept_of is None else {"good_rows_kept_of": kept_of}),
        "summary": {
            "rows": len(rows),
            "good": sum(row.good for row in rows),
            "verdicts": dict(Counter(row.verdict for row in rows).most_common()),
            "by_framework": dict(Counter(row.name.partition("/")[0] for row in rows)),
            "largest_loss_error": max((row.loss_error or 0.0 for row in tight), default=0.0),
            "largest_weight_error": max((row.weight_error or 0.0 for row in tight), default=0.0),
        },
        "rows": [row.as_json() for row in rows],
    }


def table_of(rows: Sequence[RanRow]) -> Table:
    """One line per row."""
    table = Table("row", "verdict", "loss", "weights", "s", "says", box=None)
    for row in rows:
        errors = ["" if error is None else f"{error:.0e}" for error in (row.loss_error, row.weight_error)]
        table.add_row(escape(row.name), row.verdict, *errors, f"{row.seconds:.0f}", escape(row.says[:110]),
                      style="green" if row.good else "red")  # fmt: skip
    return table


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="a regular expression in the names of rows")
    parser.add_argument("--resume", metavar="FILE", type=Path, help="rows that are bad or absent in these results")
    parser.add_argument("--list", action="store_true", help="names, nothing is run")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help='the document; "-": on stdout')
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    console = Console(stderr=arguments.json == "-", width=200)
    rows = all_rows(arguments.only)
    if arguments.list:
        for each in rows:
            console.print(each.name, markup=False)
        return
    has_before = arguments.resume is not None and arguments.resume.exists()
    before = json.loads(arguments.resume.read_text()) if has_before else {}
    kept = good_before(before, [each.name for each in rows])
    kept_of = before["commit"] if kept else None
    done = dict(kept)

    def tell(row: RanRow) -> None:
        console.print(f"{row.verdict:20} {row.seconds:6.1f} s  {row.name}: {row.says[:200]}", markup=False)
        done[row.name] = row
        if arguments.json not in (None, "-"):
            write_results(Path(arguments.json), content_of(list(done.values()), kept_of))

    todo = [each for each in rows if each.name not in kept]
    if todo:
        run_rows(todo, pool_for([each.framework for each in todo]), tell)
    found = [done[each.name] for each in rows]
    content = content_of(found, kept_of)
    if arguments.json == "-":
        print(json.dumps(document(content), indent=1))
    else:
        console.print(table_of(found))
        if arguments.json is not None:
            write_results(Path(arguments.json), content)
    console.print_json(data=content["summary"])
    sys.exit(0 if all(row.good for row in found) else 1)


if __name__ == "__main__":
    main()

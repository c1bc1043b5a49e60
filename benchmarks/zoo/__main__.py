"""The zoo: every architecture captured, planned for three questions and executed on four local processes, or on two.

    python -m benchmarks.zoo --json --output benchmarks/results/zoo.json
    python -m benchmarks.zoo --only resnet gpt2
    python -m benchmarks.zoo --ci
    python -m benchmarks.zoo --shard 1/4 --output part1.json --resume
    python -m benchmarks.zoo --third-party --output benchmarks/results/zoo_third_party.json

--third-party takes the models as other packages ship them, of those packages that are installed, on two processes;
`pip install --no-deps -r benchmarks/zoo/third_party/requirements.txt` brings them all.

Each row goes to a file of JSON lines when it is complete, beside `--output`; `--resume` skips the rows that stand
there. Exits with 1 where a row that was captured does not agree with the plain model under both plans.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import packages_distributions, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.files import cache_directory
from benchmarks.results import document, write_results
from benchmarks.workers import WORKERS
from benchmarks.zoo.registry import CI_ROWS, MODULES, ZooEntry, entries, installed, packages_of
from benchmarks.zoo.row import APART, NO_REPLICATION, STEP_TIME, Row, summarise
from benchmarks.zoo.runner import SECONDS_A_ROW, append_row, read_rows, run_rows

THIRD_PARTY_PROCESSES = 2
STYLES = {"agrees": "green", "not captured": "yellow"}


def chosen_entries(only: Sequence[str], shard: str | None, modules: Sequence[str] = MODULES) -> list[ZooEntry]:
    """The entries by name, in the order of the registry, or all; of these the i-th of n parts. Raises ValueError."""
    found = list(entries(modules))
    unknown = set(only) - {entry.name for entry in found}
    if unknown:
        raise ValueError(f"not in the zoo: {', '.join(sorted(unknown))}; there are {', '.join(e.name for e in found)}")
    found = [entry for entry in found if not only or entry.name in only]
    if shard is None:
        return found
    index, _, count = shard.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard {shard}: write i/n with 1 <= i <= n")
    return found[int(index) - 1 :: int(count)]


def table_of(rows: Sequence[Row]) -> Table:
    """One line per row: the errors and shares of its plans, and what went wrong."""
    table = Table("model", "family", "status", "no rule", "step time", "weights apart", "stored split", "replicated",
                  "s", "why", box=None)  # fmt: skip
    for row in rows:
        apart, free = row.answers.get(APART), row.answers.get(NO_REPLICATION)
        table.add_row(
            row.name,
            row.family,
            row.status,
            str(len(row.uncovered)),
            _errors(row, STEP_TIME),
            _errors(row, APART),
            "" if apart is None or apart.sharded_share is None else f"{apart.sharded_share:.0%}",
            "" if free is None or free.replicated_share is None else f"{free.replicated_share:.1%}",
            f"{row.seconds.get('row', 0.0):.1f}",
            row.reasons,
            style=STYLES.get(row.status, "red"),
        )
    return table


def _errors(row: Row, question: str) -> str:
    answer = row.answers.get(question)
    if answer is None or answer.agreement is None:
        return ""
    found = answer.agreement
    return f"{answer.mesh} {found.loss_error:.0e} {found.gradient_error:.0e} of {found.allowed:.0e}"


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these architectures")
    parser.add_argument("--ci", action="store_true", help="ten rows over all families")
    parser.add_argument("--third-party", action="store_true", help="models of other packages, on two processes")
    parser.add_argument("--shard", metavar="I/N", help="the I-th of N parts of the rows")
    parser.add_argument("--seconds", type=float, default=SECONDS_A_ROW, help="after which a row is killed")
    parser.add_argument("--resume", action="store_true", help="skip rows that stand in the file of rows")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON document here too")
    return parser.parse_args()


def versions_of(modules: Sequence[str]) -> dict[str, str]:
    """Distribution -> version of what these modules take their models from."""
    providers = packages_distributions()
    names = {name for module in modules for package in packages_of(module) for name in providers.get(package, [])}
    return {name: version(name) for name in sorted(names)}


def main() -> None:
    """Run the rows, print table or document, and write it where asked."""
    arguments = parsed()
    console = Console(stderr=True)
    modules = installed() if arguments.third_party else MODULES
    processes = THIRD_PARTY_PROCESSES if arguments.third_party else WORKERS
    try:
        chosen = chosen_entries(CI_ROWS if arguments.ci else arguments.only, arguments.shard, modules)
    except ValueError as error:
        console.print(str(error))
        sys.exit(2)
    name = "zoo_third_party.json" if arguments.third_party else "zoo.json"
    lines = (arguments.output or cache_directory() / name).with_suffix(".jsonl")
    lines.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.resume:
        lines.unlink(missing_ok=True)
    done = {row.name: row for row in read_rows(lines)}

    def keep(row: Row) -> None:
        append_row(lines, row)
        done[row.name] = row
        console.print(f"{row.name}: {row.status} {row.seconds['row']:.1f} s {row.reasons}", markup=False)

    missing = [entry for entry in chosen if entry.name not in done]
    run_rows(missing, modules, seconds=arguments.seconds, processes=processes, on_row=keep)
    rows = [done[entry.name] for entry in chosen]
    results = {
        "command": ["python", "-m", "benchmarks.zoo", *sys.argv[1:]],
        "processes": processes,
        **({"packages": versions_of(modules)} if arguments.third_party else {}),
        "summary": summarise(rows),
        "rows": [{"status": row.status, **asdict(row)} for row in rows],
    }
    if arguments.json:
        print(json.dumps(document(results), indent=1))
    else:
        Console().print(table_of(rows))
        Console().print_json(data=results["summary"])
    if arguments.output:
        write_results(arguments.output, results)
    sys.exit(0 if all(row.agrees for row in rows if row.captured) else 1)


if __name__ == "__main__":
    main()

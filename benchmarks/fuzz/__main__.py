"""Random graphs of the rule table's operators x random valid plans x 2 to 4 ranks, for a while.

    python -m benchmarks.fuzz --seconds 60
    python -m benchmarks.fuzz --graphs 10000 --output benchmarks/results/fuzz.json
    python -m benchmarks.fuzz --seed 1716          one graph again, printed with its plan
    python -m benchmarks.fuzz --attention --graphs 2000

The ranks run together in this process (`tests/simulated_ranks.py`): what would hang or corrupt real processes is an
error here, and the checker of lowered graphs looks behind every pass (but under AUTOPAR_CHECK=0). Every graph follows
from its seed alone. Exits with 1 where a value differs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from autopar.passes.lowering.observers import CHECK_VARIABLE
from benchmarks.fuzz.attention import check_attention
from benchmarks.fuzz.check import Outcome, check_seed
from benchmarks.results import write_results

DEFAULT_SECONDS = 60.0
SHOWN_OPERATORS = 10


def run(
    check: Callable[[int], Outcome], seconds: float | None, graphs: int | None, first: int, console: Console
) -> dict[str, object]:
    """Check seeds from `first` on until the time or the number of graphs is used up; returns the results."""
    started, cpu = time.monotonic(), time.process_time()
    problems: list[Outcome] = []
    operators: Counter[str] = Counter()
    sharded = done = 0
    for seed in itertools.count(first):
        if (graphs is not None and done >= graphs) or (seconds is not None and time.monotonic() - started >= seconds):
            break
        outcome = check(seed)
        done += 1
        sharded += outcome.num_sharded
        operators.update(outcome.targets)
        if outcome.problem:
            problems.append(outcome)
            console.print(f"[red]seed {seed}[/]: {outcome.problem}", highlight=False)
    return {
        "first_seed": first,
        "graphs": done,
        "mismatches": [{"seed": p.seed, "problem": p.problem} for p in problems],
        "distinct_operators": len(operators),
        "operator_calls": operators.total(),
        "sharded_calls": sharded,
        "most_common": operators.most_common(SHOWN_OPERATORS),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def main() -> None:
    """Fuzz, print what was found, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--graphs", type=int, help="stop after this number of graphs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="check this seed only and print its graph")
    parser.add_argument("--attention", action="store_true", help="models of attention under axes cp (`attention.py`)")
    parser.add_argument("--output", type=Path, help="write the results as JSON here")
    arguments = parser.parse_args()
    os.environ.setdefault(CHECK_VARIABLE, "1")
    console = Console()
    check = check_attention if arguments.attention else check_seed
    if arguments.seed is not None:
        outcome = check(arguments.seed)
        console.print(outcome.graph, highlight=False, markup=False)
        console.print(outcome.problem or "agrees", highlight=False, markup=False)
        sys.exit(1 if outcome.problem else 0)
    seconds = arguments.seconds or (DEFAULT_SECONDS if arguments.graphs is None else None)
    results = run(check, seconds, arguments.graphs, arguments.first, console)
    found, kinds = results["mismatches"], results["distinct_operators"]
    console.print(f"{results['graphs']} graphs, {kinds} distinct operators, mismatches: {found or 'none'}")
    if arguments.output:
        write_results(arguments.output, results)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()

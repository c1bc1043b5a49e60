"""Every model of `rows.py` under every way of context parallelism, against one rank.

    python -m benchmarks.context_parity                       all rows, more than an hour
    python -m benchmarks.context_parity --model mamba2 --ranks 2

The ranks run together in this process. Exits with 1 where a number differs; what the planner refuses is printed with
its reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from rich.console import Console

from autopar.errors import AutoparError
from autopar.passes.lowering.observers import CHECK_VARIABLE
from benchmarks.context_parity.check import TOLERANCE, Checked, settings_of, ways
from benchmarks.context_parity.rows import ROWS


def main() -> None:
    """Check the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(ROWS), help="of these only")
    parser.add_argument("--ranks", type=int, action="append", help="on so many ranks only")
    arguments = parser.parse_args()
    os.environ.setdefault(CHECK_VARIABLE, "1")
    console, wrong = Console(width=180), 0
    for name in arguments.model or ROWS:
        checked = Checked(ROWS[name])
        for settings in settings_of(name):
            if arguments.ranks and settings.ranks not in arguments.ranks:
                continue
            started = time.monotonic()
            try:
                plan = checked.settled(settings)
                error = checked.error(plan)
                wrong += not error < TOLERANCE
                found = f"{error:.1e} {ways(plan)} {'' if error < TOLERANCE else 'DIFFERS'}"
            except AutoparError as refusal:
                found = f"{type(refusal).__name__}: {refusal}"
            console.print(
                f"{name:24} {settings!s:28} {time.monotonic() - started:5.1f} s  {found}", highlight=False, markup=False
            )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

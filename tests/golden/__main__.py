"""Compare the golden files with what is made today, or write them anew; names of cases choose some.

    python -m tests.golden                       says what differs
    python -m tests.golden --update stack-free   writes the files of one case
"""

from __future__ import annotations

import argparse
import os
import tempfile

from tests.golden.cases import CASES
from tests.golden.stored import SAME_TORCH, TORCH, UPDATE, difference, write
from tests.golden.texts import texts


def main() -> int:
    """0 where nothing differs, or all is written."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the files instead of comparing")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    options = parser.parse_args()
    unknown = sorted(set(options.cases) - CASES.keys())
    if unknown:
        parser.error(f"no case {', '.join(unknown)}: write some of {', '.join(CASES)}")
    if not SAME_TORCH:
        parser.error(f"the files show what torch {TORCH} captures (`stored.TORCH`): take that one, or change both")
    differences = []
    for name in options.cases or CASES:
        found = texts(CASES[name])
        differences.append(difference(name, found))
        if options.update:
            write(name, found)
    changed = "\n".join(one for one in differences if one)
    print(changed or "nothing differs")
    if changed and not options.update:
        print(f"\nif this is meant: {UPDATE}")
    return int(bool(changed) and not options.update)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE"] = folder  # what was measured on this machine counts for nothing
        raise SystemExit(main())

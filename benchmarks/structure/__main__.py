"""Measures of the source tree, printed and kept.

    python -m benchmarks.structure                        # writes benchmarks/results/structure.json
    python -m benchmarks.structure --against 53c28ac      # with a second column: that commit
    python -m benchmarks.structure --at 53c28ac           # that commit alone, printed and not kept
    python -m benchmarks.structure --names                # also every place that a count stands for

What each measure counts is said in `measures.py` (sizes, types, words) and `import_graph.py` (entries, levels, arrows).
Sources are parsed, never imported, so that any commit can be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import write_results
from benchmarks.structure.import_graph import declared_layers
from benchmarks.structure.measures import structure
from benchmarks.structure.source_tree import commit_of, is_changed, tree_at

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "benchmarks" / "results" / "structure.json"
LAYERS_FILE = Path("tests/test_import_order.py")


def measured(root: Path) -> dict[str, Any]:
    """The measures of the tree at `root`, against the layers that it declares itself."""
    return structure(root, declared_layers(root / LAYERS_FILE))


def measured_at(commit: str) -> dict[str, Any]:
    """The commit's hash and the measures of its tree."""
    with tree_at(ROOT, commit) as folder:
        return {"commit": commit_of(ROOT, commit), **measured(folder)}


def rows(found: Any, prefix: str = "") -> list[tuple[str, str]]:
    """(measure, printed value) of a document: lists and counted names as their lengths."""
    if isinstance(found, list):
        return [(prefix, str(len(found)))]
    if not isinstance(found, Mapping):
        return [(prefix, str(found)[:12] if prefix == "commit" else str(found))]
    if set(found) == {"lines", "name"}:
        return [(prefix, f"{found['lines']} ({found['name'].rpartition('/')[2]})")]
    if set(found) == {"entries", "levels"}:
        return [(f"{prefix}: entries on levels", f"{found['entries']} on {found['levels']}")]
    if prefix.startswith(("names.", "pipeline_is_none.where", "planner_constants.most")):
        return [(prefix, str(len(found)))]
    return [row for key, value in found.items() for row in rows(value, f"{prefix}.{key}" if prefix else key)]


def table(columns: Sequence[Mapping[str, Any]]) -> str:
    """The measures line by line, one column per document; a measure that a document lacks is `-`."""
    found = [dict(rows(column)) for column in columns]
    names = list(dict.fromkeys(name for column in reversed(found) for name in column))
    cells = [[name, *(column.get(name, "-") for column in found)] for name in names]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns) + 1)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def places(found: Any, prefix: str = "") -> list[str]:
    """Every list of places in a document, one place a line."""
    if isinstance(found, list):
        return [f"{prefix}: {place}" for place in found]
    if not isinstance(found, Mapping):
        return []
    return [line for key, value in found.items() for line in places(value, f"{prefix}.{key}" if prefix else key)]


def main() -> None:
    """Print, and keep, what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT", help="measure this commit alone; nothing is kept")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit too")
    parser.add_argument("--names", action="store_true", help="print the places, too")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    if arguments.at:
        documents = {"at": measured_at(arguments.at)}
    else:
        documents = {"before": measured_at(arguments.against)} if arguments.against else {}
        documents["now"] = {"commit": commit_of(ROOT) + ("+" if is_changed(ROOT) else ""), **measured(ROOT)}
        command = "python -m benchmarks.structure" + (f" --against {arguments.against}" if arguments.against else "")
        write_results(arguments.output, {"command": command, **documents})
    columns = list(documents.values())
    print(table(columns))
    if arguments.names:
        print("", *places(columns[-1]), sep="\n")


if __name__ == "__main__":
    main()

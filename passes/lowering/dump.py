"""Dump: the graphs of a stage as readable Python behind every pass, and what the pass changed.

    folder/rank0-stage0/04-split.py          # forward: def forward(...): ...  # backward: ...
    folder/rank0-stage0/04-split.diff        against 03-join_kernels.py

A line is a call, and behind it the operator of the model, local shape, dtype and what it is a copy of.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from autopar.files import write_atomically
from autopar.passes.graph_text import graph_text
from autopar.passes.lowering.stage import LoweredStage


def dump_stage(stage: LoweredStage, number: int, name: str, folder: Path) -> None:
    """Write the graphs of a stage, which a pass has made, and the difference to the file of the pass before."""
    context = stage.context
    place = folder / f"rank{context.rank}-stage{context.number}"
    place.mkdir(parents=True, exist_ok=True)
    lines = list(stage_text(stage))
    before = sorted(place.glob(f"{number - 1:02d}-*.py"))
    write_atomically(place / f"{number:02d}-{name}.py", "\n".join([*lines, ""]).encode())
    if before:
        old = before[0].read_text().splitlines()
        changed = difflib.unified_diff(old, lines, before[0].name, f"{number:02d}-{name}.py", lineterm="")
        write_atomically(place / f"{number:02d}-{name}.diff", "\n".join([*changed, ""]).encode())


def stage_text(stage: LoweredStage) -> Iterator[str]:
    """Every graph of a stage as a function."""
    for name, module in stage.graphs.items():
        yield from (f"def {name}(given):", *(f"    {line}" for line in graph_text(module.graph)), "")

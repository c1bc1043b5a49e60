"""Who looks at a stage behind every pass of its lowering.

AUTOPAR_CHECK=1        the checker: what the graphs say is what they must hold (`checks.py`)
AUTOPAR_DUMP=folder    the graphs as readable Python, one file a pass, and what the pass changed (`dump.py`)

The variables are read at every lowering, so that a session may turn them on and off. Whether ranks compare the order
of their collectives is the first rank's answer (`runtime/emit_step.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import fx

from autopar.passes.lowering.checks import check_stage
from autopar.passes.lowering.dump import dump_stage
from autopar.passes.lowering.stage import LoweredStage

CHECK_VARIABLE = "AUTOPAR_CHECK"
DUMP_VARIABLE = "AUTOPAR_DUMP"


def is_checked() -> bool:
    """Whether lowered graphs are checked: the variable is set, and not to 0."""
    return os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")


class Observer:
    """Follows one stage through its passes: checks and dumps what each has changed, where that is asked for."""

    def __init__(self, stage: LoweredStage) -> None:
        self._folder, self._checks = os.environ.get(DUMP_VARIABLE), is_checked()
        self._seen = _marks(stage) if self._checks else {}

    def look(self, stage: LoweredStage, number: int, name: str) -> None:
        """number, name: of the pass that has run."""
        if self._folder:
            dump_stage(stage, number, name, Path(self._folder))
        if self._checks:
            marks = _marks(stage)
            same = {graph for graph, mark in marks.items() if self._seen.get(graph) == mark}
            check_stage(stage, name, same)
            self._seen = marks


def _marks(stage: LoweredStage) -> dict[str, int]:
    """By name of a graph, what tells it from one that a pass changed: its calls and what its nodes say."""
    return {name: hash(tuple(map(_mark, module.graph.nodes))) for name, module in stage.graphs.items()}


def _mark(node: fx.Node) -> tuple[object, ...]:
    """What the checker reads of a node; operands by their names, which are unique in a graph."""
    says = tuple(node.meta.get(key) for key in ("local_shape", "dtype", "layout"))
    return node.name, node.target, repr((node.args, node.kwargs)), repr(says)

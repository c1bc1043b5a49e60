"""Who looks at a stage behind every pass of its lowering.

AUTOPAR_CHECK=1        the checker: what the graphs say is what they must hold (`checks.py`)
AUTOPAR_DUMP=folder    the graphs as readable Python, one file a pass, and what the pass changed (`dump.py`)

The variables are read at every lowering, so that a session may turn them on and off.
"""

from __future__ import annotations

import os
from pathlib import Path

from autopar.passes.lowering.checks import check_stage
from autopar.passes.lowering.dump import dump_stage
from autopar.passes.lowering.stage import LoweredStage

CHECK_VARIABLE = "AUTOPAR_CHECK"
DUMP_VARIABLE = "AUTOPAR_DUMP"


def is_checked() -> bool:
    """Whether lowered graphs are checked: the variable is set, and not to 0."""
    return os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")


def observe(stage: LoweredStage, number: int, name: str) -> None:
    """Check and dump the stage, where that is asked for. number, name: of the pass that has run."""
    folder = os.environ.get(DUMP_VARIABLE)
    if folder:
        dump_stage(stage, number, name, Path(folder))
    if is_checked():
        check_stage(stage, name)

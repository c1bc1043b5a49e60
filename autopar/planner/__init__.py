"""The planner: a captured program and a request come in, a Plan goes out; neither devices nor weights are needed.

    planner.make_plan(program, request)

What brings the solver library is loaded at its first use: a rank that is given its plan needs none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.planner.planning import make_plan as make_plan

LOADED_LATER = {"make_plan": "autopar.planner.planning"}
"""Name -> the module that it comes from."""


def __getattr__(name: str) -> object:
    if name not in LOADED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LOADED_LATER[name]), name)

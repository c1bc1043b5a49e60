"""Plans under a short memory limit: the sum that hides communication of parameters first, or the plain sum alone.

    python -m benchmarks.planner.short_memory [RESULT.json] [--default]

Every question is asked both ways in one process, behind one that nobody counts. CPU seconds, predicted seconds of the
step and the gap of its own sum. --default: in that mode, which takes ten minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

import autopar
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.hidden_first import HiddenFirst
from autopar.planner.search import best_plan
from autopar.request.search_mode import Mode
from autopar.timing import cpu_seconds
from benchmarks.models import workload
from benchmarks.results import write_results

COMMAND = "python -m benchmarks.planner.short_memory RESULT.json"
CASES: tuple[tuple[str, int, int, str, tuple[Mapping[str, Any], ...]], ...] = (
    (
        "llama3-8b", 8, 8192, "8 H100-SXM",
        (
            {"dims": {"cp": 8}},
            *({"memory_limit": limit} for limit in ("50GiB", "40GiB", "30GiB", "25GiB")),
            {"mesh": (2, 4), "memory_limit": "50GiB"},
        ),
    ),
    ("llama3-8b", 32, 8192, "2x8 H100-SXM", ({},)),
    ("gpt2", 64, 1024, "4 H100-SXM", tuple({"memory_limit": limit} for limit in ("6GiB", "4GiB", "3GiB"))),
)  # fmt: skip
"""Workload, batch, tokens, cluster, and what is asked."""


class PlainFirst(HiddenFirst):
    """Does not look."""

    def look(self, bounds: Mapping[Mesh, float]) -> None:
        """Nothing."""


def _asked(planner: autopar.Planner, question: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
    began = cpu_seconds()
    try:
        plan = planner.plan(mode=mode, **question)
    except autopar.InfeasibleError as error:
        return {"error": str(error).splitlines()[0][:160], "cpu_seconds": round(cpu_seconds() - began, 1)}
    return {
        "cpu_seconds": round(cpu_seconds() - began, 1),
        "step_ms": round(plan.predicted.step_seconds * 1e3, 2),
        "gap": round(plan.gap, 4),
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "micro_batches": plan.micro_batches,
        "hidden_share": plan.hidden_share,
    }


def rows(mode: Mode, show: Callable[[Any], None]) -> list[dict[str, Any]]:
    """A row a question."""
    found = []
    for name, batch, tokens, cluster, questions in CASES:
        model, inputs = workload(name, batch=batch, seq=tokens)
        planner = autopar.Planner(model, inputs, cluster=cluster, optimizer=torch.optim.AdamW)
        planner.plan(mode="fast", dims={"dp_shard": -1})
        for question in questions:
            hidden_first = _asked(planner, question, mode)
            with patch.object(best_plan, "HiddenFirst", PlainFirst):
                plain = _asked(planner, question, mode)
            row = {
                "workload": name, "batch": batch, "tokens": tokens, "cluster": cluster, "mode": mode,
                "asked": {key: list(value) if isinstance(value, tuple) else value for key, value in question.items()},
                "hidden_first": hidden_first, "plain": plain,
            }  # fmt: skip
            show(row)
            found.append(row)
    return found


def main() -> None:
    """Print all rows, and keep them where a file is named."""
    console = Console(width=200)
    mode: Mode = "default" if "--default" in sys.argv else "fast"
    found = rows(mode, lambda row: console.print(row, highlight=False))
    files = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if files:
        command = COMMAND + (" --default" if mode == "default" else "")
        write_results(Path(files[0]), {"command": command, "rows": found})


if __name__ == "__main__":
    main()

"""Plans for GPUs with and without kernels of ours in the program that is planned: objective, step, peak, seconds.

    python -m benchmarks.kernels_in_the_sum [RESULT.json [MODEL ...]]

Names of models choose some of the cases; the file keeps the rows of the others.

Both are planned under one question, of weights in bf16, in mode "fast". All figures are predictions; no GPU has run
them. `seconds` are CPU seconds of the planner, capture included, of one run each. hides_logits: the model returns its
loss alone, so that a loss in chunks may be planned; it is compared with a whole loss and the other kernels.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import FOR_MEMORY, KERNELS
from benchmarks.models import LossOnly, workload
from benchmarks.results import write_results

DATA = {"dims": {"dp_shard": 8}}
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], bool], ...] = (
    ("gpt2", {"batch": 64, "seq": 1024}, DATA, False),
    ("llama3-8b", {"batch": 16, "seq": 4096}, DATA, False),
    ("llama3-8b", {"batch": 16, "seq": 4096}, {"dims": {"tp": 8}}, False),
    ("llama3-8b", {"batch": 16, "seq": 4096}, {"dims": {"pp": 2, "tp": 4}, "micro_batches": 8}, False),
    ("llama3-8b", {"batch": 8, "seq": 32768}, DATA, True),
    ("olmoe-64-experts", {"batch": 16, "seq": 1024}, {}, False),
    ("t5", {"batch": 32, "seq": 512}, {}, False),
)
"""(model, its batch, what is asked of 8 H100, whether it hides its logits); without dims all meshes are searched."""
WHOLE = tuple(kind for kind in KERNELS if kind not in ("layer_norm", *FOR_MEMORY))
"""Kinds of a Llama, the loss whole."""


def row(
    name: str, sizes: dict[str, Any], question: dict[str, Any], kernels: tuple[str, ...] | None, hides_logits: bool
) -> dict[str, Any]:
    """One plan. kernels: None as the planner chooses."""
    model, inputs = workload(name, **sizes)
    model = LossOnly(model) if hides_logits else model
    began = time.process_time()
    plan = autopar.plan(
        model, inputs, cluster="8 H100-SXM", mode="fast", kernels=kernels, **question
    )
    assert isinstance(plan, Plan)
    return {
        "kernels": list(plan.kernels),
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "objective_seconds": plan.objective_seconds,
        "gap": plan.gap,
        "step_seconds": plan.predicted.step_seconds,
        "peak_bytes": plan.predicted.peak_bytes,
        "operators": len(plan.operators),
        "recomputed": len(plan.recomputed),
        "notes": [note for note in plan.notes if "memory is short" in note],
        "seconds": time.process_time() - began,
    }


def main(arguments: list[str]) -> None:
    """Print the table and, with a path, write it."""
    path, names = Path(arguments[0]) if arguments else None, arguments[1:]
    kept = json.loads(path.read_text())["rows"] if path and names else []
    table = Table("model", "asked", "kernels", "step ms", "peak GiB", "operators", "planned in s", box=None)
    rows = [one for one in kept if one["model"] not in names]
    for name, sizes, question, hides_logits in (case for case in CASES if not names or case[0] in names):
        without, found = (
            row(name, sizes, question, kernels, hides_logits) for kernels in (WHOLE if hides_logits else (), None)
        )
        rows.append(
            {"model": name, **sizes, "asked": question, "hides_logits": hides_logits, "without": without, "with": found}
        )
        for one in (without, found):
            table.add_row(
                name, str(question.get("dims", "free")), ", ".join(one["kernels"]) or "none",
                f"{one['step_seconds'] * 1e3:.1f}", f"{one['peak_bytes'] / 2**30:.2f}", str(one["operators"]),
                f"{one['seconds']:.1f}",
            )  # fmt: skip
    Console(width=160).print(table)
    if path:
        write_results(path, {"cluster": "8 H100-SXM", "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])

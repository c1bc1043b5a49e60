"""What is carried to a machine that plans nothing: plans of all models and the commit.

    python -m benchmarks.gpu --prepare carried --cluster "1 H100-SXM"

Models are built on meta, so no weights are made. A plan says which graph it is for: make it with the torch of the
machine, or it is made there again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import autopar
from autopar.files import write_atomically
from benchmarks.gpu.machine import COMMIT_FILE, commit
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.steps import plan_path


def prepare(folder: Path, cluster: str, *, tiny: bool, say: Callable[[str], None]) -> None:
    """Write everything into the folder. tiny: for a rehearsal."""
    write_atomically(folder / COMMIT_FILE, f"{commit(None) or ''}\n".encode())
    for name, measured in MODELS.items():
        made = measured.made("meta", tiny=tiny)
        plan = autopar.plan(
            made.model, dict(made.inputs), cluster=cluster, optimizer=torch.optim.AdamW, precision="bf16", mode="fast"
        )
        path = plan_path(folder, name, tiny=tiny)
        plan.save(path)
        seconds, peak = plan.predicted.step_seconds, plan.predicted.peak_bytes
        say(f"{path}: {seconds * 1e3:.1f} ms, {peak / 2**30:.2f} GiB, {path.stat().st_size / 2**10:.0f} KiB")

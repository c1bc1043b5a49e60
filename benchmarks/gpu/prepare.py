"""What is carried to a machine that plans nothing: plans of all models and the commit.

    python -m benchmarks.gpu --prepare carried --cluster "1 H100-SXM"
    python -m benchmarks.gpu --prepare carried --cluster "8 H100-SXM"

Models are built on meta, so no weights are made. A plan says which graph it is for: make it with the torch of the
machine, or it is made there again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

import autopar
from autopar.files import write_atomically
from autopar.hardware.cluster import Cluster
from benchmarks.gpu.machine import COMMIT_FILE, commit
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.parallel import DIMS, plan_name, question
from benchmarks.gpu.stage import Place
from benchmarks.gpu.steps import MIXED, plan_path


def prepare(
    folder: Path, cluster: str, *, tiny: bool, say: Callable[[str], None], models: Collection[str] = tuple(MODELS)
) -> None:
    """Write everything into the folder: for one device the plans of `models`, for several those of the ways to split
    one. tiny: for a rehearsal."""
    write_atomically(folder / COMMIT_FILE, f"{commit(None) or ''}\n".encode())
    place = Place(device=torch.device("meta"), rehearse=tiny)
    ranks = Cluster.parse(cluster).num_devices
    questions = (
        {name: (MODELS[name].made("meta", tiny=tiny), MIXED) for name in models}
        if ranks == 1
        else {plan_name(way, ranks): question(place, way, ranks) for way in DIMS}
    )
    for name, (made, asked) in questions.items():
        plan = autopar.plan(made.model, dict(made.inputs), cluster=cluster, **asked)
        path = plan_path(folder, name, tiny=tiny)
        plan.save(path)
        seconds, peak = plan.predicted.step_seconds, plan.predicted.peak_bytes
        say(f"{path}: {seconds * 1e3:.1f} ms, {peak / 2**30:.2f} GiB, {path.stat().st_size / 2**10:.0f} KiB")

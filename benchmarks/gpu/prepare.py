"""What is carried to a machine that plans nothing: plans of all models and the commit.

    python -m benchmarks.gpu --prepare carried --cluster "1 H100-SXM" "1 H200-SXM" "8 H100-SXM"

Models are built on meta, so no weights are made. A plan says which graph it is for: make it with the torch of the
machine, or it is made there again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch

import autopar
from autopar.files import write_atomically
from autopar.hardware.cluster import Cluster
from benchmarks.gpu.machine import COMMIT_FILE, commit
from benchmarks.gpu.models import MODELS, Made
from benchmarks.gpu.parallel import DIMS, plan_name, question
from benchmarks.gpu.stage import Place
from benchmarks.gpu.steps import MIXED, Asked, plan_path


def prepare(
    folder: Path,
    clusters: Sequence[str],
    *,
    tiny: bool,
    say: Callable[[str], None],
    models: Collection[str] = tuple(MODELS),
) -> None:
    """Write everything into the folder. clusters: one device gets the plans of `models`, several those of the ways to
    split one; tiny: for a rehearsal."""
    write_atomically(folder / COMMIT_FILE, f"{commit(None) or ''}\n".encode())
    place = Place(device=torch.device("meta"), rehearse=tiny)
    for cluster in map(Cluster.parse, clusters):
        for name, (made, asked) in questions(place, cluster.num_devices, models):
            plan = autopar.plan(made.model, dict(made.inputs), cluster=cluster, **asked)
            path = plan_path(folder, cluster, name, tiny=tiny)
            path.parent.mkdir(exist_ok=True)
            plan.save(path)
            seconds, peak = plan.predicted.step_seconds, plan.predicted.peak_bytes
            say(f"{path}: {seconds * 1e3:.1f} ms, {peak / 2**30:.2f} GiB, {path.stat().st_size / 2**10:.0f} KiB")


def questions(place: Place, ranks: int, models: Collection[str]) -> Iterator[tuple[str, tuple[Made, Asked]]]:
    """Name of a plan, and what it is asked for."""
    if ranks == 1:
        for name in models:
            yield name, (MODELS[name].made(place.device, tiny=place.rehearse), MIXED)
    else:
        for way in DIMS:
            yield plan_name(way, ranks), question(place, way, ranks)

"""From a network to numbers: the profile that plans are made from, and the training of runs on the emulated cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from autopar.cluster import Cluster
from autopar.parallel_plan import Plan
from benchmarks.netlab.lab import Lab, network_cache
from benchmarks.netlab.presets import Network
from benchmarks.plan_quality.job import RESULTS, RUNS

SETTING_SECONDS = 900.0
"""After so long, something hangs."""


def profiled(network: Network, console: Console) -> Cluster:
    """The cluster as `autopar profile` measures it; measured once, then kept in the network's cache."""
    folder = network_cache(network) / "clusters"
    if not folder.exists():
        console.print(f"profiling {network.name}")
        with Lab(network) as lab:
            lab.run([sys.executable, "-m", "autopar", "profile", "--force"], quiet=True)
    return Cluster.from_file(next(folder.glob("*.json")))


def train(
    name: str,
    network: Network,
    folder: Path,
    plans: Mapping[str, Plan],
    baselines: Sequence[str],
    steps: int,
    again: int,
) -> dict[str, Any]:
    """What `job` measured of a setting: {"rows": run -> steps, "errors": run -> reason, "peak_bytes": run -> bytes,
    "elapsed": phase -> seconds}.

    folder: a new one, for plans and results. Raises AutoparError where a rank fails or nothing comes back.
    """
    folder.mkdir(parents=True)
    for kind, plan in plans.items():
        plan.save(folder / f"{kind}.plan")
    (folder / RUNS).write_text(json.dumps([*plans, *baselines]))
    command = [sys.executable, "-m", "benchmarks.plan_quality.job", name, str(folder), str(steps), str(again)]
    with Lab(network) as lab:
        lab.run(command, seconds=SETTING_SECONDS)
    found: dict[str, Any] = json.loads((folder / RESULTS).read_text())
    return found

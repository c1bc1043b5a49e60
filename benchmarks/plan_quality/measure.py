"""From a network to numbers: the profile that plans are made from, and the training of runs on the emulated cluster."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from autopar.cli.commands import commands
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from benchmarks.netlab.lab import Lab, network_cache
from benchmarks.netlab.presets import Network
from benchmarks.plan_quality.baselines import Baseline
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.job import RESULTS, train_all
from benchmarks.plan_quality.settings import Setting

SETTING_SECONDS = 420.0
"""After so long, something hangs."""


def profiled(network: Network, console: Console) -> Cluster:
    """The cluster as `autopar profile` measures it; measured once, then kept in the network's cache."""
    folder = network_cache(network) / "clusters"
    if not folder.exists():
        began = time.perf_counter()
        with Lab(network) as lab:
            lab.fork(_measure_links, quiet=True)
        console.print(f"profiling {network.name} took {time.perf_counter() - began:.0f} s")
    return Cluster.from_file(_profile(network))


def _measure_links(limit_cores: Callable[[], None]) -> None:
    limit_cores()
    commands.main(["profile", "--force"], standalone_mode=False)


def profile_age(network: Network) -> float:
    """Seconds since the network was profiled."""
    return time.time() - _profile(network).stat().st_mtime


def _profile(network: Network) -> Path:
    return next((network_cache(network) / "clusters").glob("*.json"))


def train(
    setting: Setting,
    folder: Path,
    plans: Mapping[str, Plan],
    baselines: Mapping[str, Baseline],
    steps: int,
    again: int,
) -> dict[str, Any]:
    """What `job` measured of a setting: {"rows": run -> steps, "errors": run -> reason, "peak_bytes": run -> bytes,
    "elapsed": phase -> seconds}.

    The model is captured here, once for all plans and ranks, which are forks of this process.

    folder: a new one, for plans, logs and results. Raises AutoparError where a rank fails or nothing comes back.
    """
    folder.mkdir(parents=True)
    torch.set_num_threads(1)  # before the first product: its threads would be lost in the forks
    captured = Captured(setting) if plans else None
    for kind, plan in plans.items():
        plan.save(folder / f"{kind}.plan")  # for `autopar calibrate`, beside the run's log
        assert captured is not None
        captured.program(plan)
    call = functools.partial(train_all, setting, plans, baselines, captured, folder, steps, again)
    with Lab(setting.network) as lab:
        lab.fork(call, seconds=SETTING_SECONDS)
    found: dict[str, Any] = json.loads((folder / RESULTS).read_text())
    return found

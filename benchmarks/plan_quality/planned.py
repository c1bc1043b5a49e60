"""Our plans of a setting, made once and kept: planning is not measured, so no lab waits for it.

    make_missing({"gpt-200mbit": cluster, ...}, console)       # two settings at a time, each in a process of its own
    load("gpt-200mbit", cluster)                               # Planned(plans={"autopar": Plan, ...}, ...)

They lie in the cache of their network, under the digest of all that they follow from: the cluster's numbers, autopar's
source and that of the settings. So a plan of other code or of another profile is never trained.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

import autopar
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from benchmarks.netlab.lab import network_cache
from benchmarks.netlab.processes import end_sessions
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.plans import make_plans, predicted
from benchmarks.plan_quality.settings import SETTINGS

AT_A_TIME = 2
SAID = "said.json"
FOLLOWS_FROM = ("models.py", "settings.py", "plans.py", "searches.py", "captured.py")
"""Files of this folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """left_out: name -> why there is no such plan; predicted: name -> what `plans.predicted` says; seconds: how long
    it took."""

    plans: Mapping[str, Plan]
    left_out: Mapping[str, str]
    predicted: Mapping[str, Mapping[str, Any]]
    seconds: float


def make_missing(clusters: Mapping[str, Cluster], console: Console) -> dict[str, str]:
    """Plan the settings, each for its cluster, that have no plans yet; setting -> last line of what failed."""
    waiting = [name for name, cluster in clusters.items() if not _folder(name, cluster).exists()]
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        running: dict[str, subprocess.Popen[str]] = {}
        stack.callback(lambda: end_sessions(list(running.values())))
        while waiting or running:
            while waiting and len(running) < AT_A_TIME:
                name = waiting.pop(0)
                running[name] = _start(name, clusters[name])
            for name, process in list(running.items()):
                if process.poll() is not None:
                    text = process.communicate()[0]
                    console.print(text, end="", markup=False, highlight=False)
                    if process.returncode:
                        failed[name] = (text.splitlines() or ["nothing was said"])[-1]
                    del running[name]
            time.sleep(0.1)
    return failed


def load(name: str, cluster: Cluster) -> Planned:
    """What `make_missing` made. Raises AutoparError where it has not."""
    folder = _folder(name, cluster)
    if not folder.exists():
        raise AutoparError(f"{name} has no plans for {cluster.name}: the planning has failed")
    said = json.loads((folder / SAID).read_text())
    plans = {kind: Plan.load(folder / f"{kind}.plan") for kind in said["predicted"]}
    return Planned(plans=plans, left_out=said["left_out"], predicted=said["predicted"], seconds=said["seconds"])


def make(name: str, cluster: Cluster) -> None:
    """Plan a setting in this process, and write everything at once."""
    began, setting = time.perf_counter(), SETTINGS[name]
    plans, left_out = make_plans(setting, cluster, lambda line: print(line, flush=True))
    captured = Captured(setting)
    said = {
        "predicted": {kind: predicted(captured, plan, cluster) for kind, plan in plans.items()},
        "left_out": left_out,
        "seconds": time.perf_counter() - began,
    }
    print(f"{name}: planning took {said['seconds']:.0f} s", flush=True)
    target = _folder(name, cluster)
    shutil.rmtree(target.parent, ignore_errors=True)  # plans of other code or of an older profile
    target.parent.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "made"
        made.mkdir()
        for kind, plan in plans.items():
            plan.save(made / f"{kind}.plan")
        (made / SAID).write_text(json.dumps(said))
        made.rename(target)


def _start(name: str, cluster: Cluster) -> subprocess.Popen[str]:
    file = network_cache(SETTINGS[name].network) / "planned" / f"{name}.cluster.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    cluster.save(file)
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "benchmarks.plan_quality.planned", name, str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _folder(name: str, cluster: Cluster) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(cluster, order="deterministic"))
    for path in _sources():
        digest.update(path.read_bytes())
    return network_cache(SETTINGS[name].network) / "planned" / name / digest.hexdigest()[:16]


def _sources() -> Iterable[Path]:
    """autopar's source, through the links of its folders, and what settings are made of; in one order."""
    package = Path(autopar.__file__).parent
    found = [
        Path(folder) / file
        for folder, _, files in os.walk(package, followlinks=True)
        for file in files
        if file[-3:] == ".py"
    ]
    return [*sorted(found), *(Path(__file__).with_name(file) for file in FOLLOWS_FROM)]


if __name__ == "__main__":
    make(sys.argv[1], Cluster.from_file(sys.argv[2]))

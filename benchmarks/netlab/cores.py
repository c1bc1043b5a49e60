"""A share of a core per rank: a cgroup whose processes run `cores` x 10 ms in every 10 ms, and no longer.

    with 4 ranks on 2 cores, a rank that computes while the others wait would get a whole core;
    half a core each, and a waiting rank's share is nobody's: as on machines of their own

What else runs on the machine takes little of it: beside these groups it weighs a sixteenth.

Both kinds of cgroup: v1 (/sys/fs/cgroup/cpu/NAME/cpu.cfs_quota_us) and v2 (/sys/fs/cgroup/NAME/cpu.max).
"""

from __future__ import annotations

import os
from pathlib import Path

from autopar.errors import AutoparError

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Shorter ones cut the same: the scheduler looks every 4 ms."""
WEIGHT = 16
"""Times that of a process outside: with two busy ones on two cores, products of four ranks of 0.3 would else take their
turns among six, and profiles say what the neighbours did."""


def cores_directory(root: Path = ROOT) -> Path:
    """Where groups that share out cores are made. Raises AutoparError where the machine has none that we may use."""
    if (root / "cpu" / "cpu.cfs_quota_us").exists() or (root / "cpu" / "cgroup.procs").exists():
        return root / "cpu"
    controllers = root / "cgroup.subtree_control"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return root
    raise AutoparError(f"{root} shares out no cores (no cpu controller): take a network with cores_per_rank=None")


def limits(cores: float, directory: Path) -> dict[str, str]:
    """File -> content that gives a group under `directory` this many cores."""
    quota = round(cores * PERIOD_US)
    if (directory / "cgroup.subtree_control").exists():
        return {"cpu.max": f"{quota} {PERIOD_US}", "cpu.weight": str(100 * WEIGHT)}
    return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota), "cpu.shares": str(1024 * WEIGHT)}


def make_group(name: str, cores: float, directory: Path) -> Path:
    """A new group; processes join it by `join_command`."""
    group = directory / name
    group.mkdir()
    for file, content in limits(cores, directory).items():
        (group / file).write_text(content)
    return group


def join_command(group: Path, command: list[str]) -> list[str]:
    """The command inside of the group, its children too."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


def join(group: Path) -> None:
    """This process with all its threads, from now on."""
    (group / "cgroup.procs").write_text(str(os.getpid()))

"""Names of what a lab makes on this machine, and how leftovers of a killed one are told from a running one.

    autopar-netlab-4711-0-n2       node 2 of the first lab of process 4711
    autopar-netlab-4711-0-r3       the cgroup of its rank 3

A name says which process it belongs to: where that process has gone, what bears its name is a leftover. Nothing that is
named otherwise is ever touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PREFIX = "autopar-netlab"
_NAME = re.compile(rf"{PREFIX}-(\d+)-\d+-[nr]\d+")


def lab_name(process: int, number: int) -> str:
    """What all names of a process's lab begin with."""
    return f"{PREFIX}-{process}-{number}"


def node_name(lab: str, node: int) -> str:
    """The network namespace of a node."""
    return f"{lab}-n{node}"


def rank_name(lab: str, rank: int) -> str:
    """The cgroup of a rank."""
    return f"{lab}-r{rank}"


def is_running(process: int) -> bool:
    """Whether the process exists."""
    return Path(f"/proc/{process}").exists()


def leftovers(names: Iterable[str]) -> list[str]:
    """Those of a lab whose process is gone."""
    return [name for name in names if (match := _NAME.fullmatch(name)) and not is_running(int(match[1]))]

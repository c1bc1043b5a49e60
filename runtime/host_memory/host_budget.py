"""What a process may have in the memory of its machine for the sake of its device, as plans are made for.

check_room(plan)         before the first step: a plan with more on the host than this machine has room for is refused
"""

from __future__ import annotations

import os

from autopar.errors import HostMemoryError
from autopar.hardware.hosts import USABLE_SHARE
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes
from autopar.plans.rung_names import host_bytes


def host_budget_bytes(machine_bytes: int | None = None) -> int:
    """The part of one process: the same of the machine's memory that the planner counts on (`Host.bytes_per_device`),
    shared by the processes that the launcher started here. machine_bytes: in place of this machine's."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if machine_bytes is None else machine_bytes
    return int(USABLE_SHARE * whole / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def check_room(plan: Plan, budget_bytes: int | None = None) -> None:
    """Raise HostMemoryError where a plan puts more on the host than `budget_bytes`, by default what this machine has
    for a process."""
    budget, there = host_budget_bytes() if budget_bytes is None else budget_bytes, host_bytes(plan.predicted)
    if there > budget:
        raise HostMemoryError(
            f"the plan puts {format_bytes(there)} of every device on the host, and this machine has room for "
            f"{format_bytes(budget)} of each of its processes: plan for a cluster whose host has its memory "
            "(Cluster.host), or with another offload="
        )

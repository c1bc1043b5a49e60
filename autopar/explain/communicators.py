"""Communicators: the process groups that a rank of a plan joins, each of which holds memory of NCCL's on a GPU.

2 x 4 ranks, dp_shard x tp, sums over both     8 (the default group, of "dp_shard+tp", too), 2, 4 (an axis each)

The runtime makes these (`runtime/process_groups.py`, `runtime/pipeline/emit_parts.py`); with `device_id` torch starts
the communicator of each at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from autopar.plans.parallel_plan import Plan
from autopar.runtime.step.bound_graphs import group_symbols


def communicator_ranks(plan: Plan, group: int, graphs: Iterable[fx.GraphModule]) -> tuple[int, ...]:
    """Ranks of every group that a rank joins. group: its rank group; graphs: what it runs."""
    if plan.num_ranks == 1:
        return ()
    sizes = dict(zip(plan.layout_mesh.axis_names, plan.rank_groups[group].shape, strict=True))
    joined = [symbol.split("+") for symbol in sorted(group_symbols(*graphs)) if "+" in symbol]
    over_axes = [*sizes.values(), *(math.prod(sizes[axis] for axis in axes) for axes in joined)]
    if plan.in_stages:
        over_axes.append(len(plan.rank_groups))
    return plan.num_ranks, *(size for size in over_axes if 1 < size < plan.num_ranks)

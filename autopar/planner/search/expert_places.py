"""Experts placed by load: for a plan whose rows travel, the order of experts by which its busiest rank has few of them.

    experts_by_load(query, plan, copies)      {"layers.0.experts": PlacedExperts(order=(0, 3, 1, 2), busiest=0.5, ...)}

A choice after the solve, priced by another one: how many rows the busiest rank has and what travels follow from the
order. Replicated experts have places and no rows there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from autopar.errors import PlanMismatchError
from autopar.passes.lowering.placed_experts import order_of_parameters
from autopar.planner.one_mesh.query import Query
from autopar.plans.expert_placement import PlacedExperts, placed_experts
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import expert_ranks

log = logging.getLogger(__name__)


def experts_by_load(
    query: Query, plan: Plan, copies: Mapping[str, tuple[int, ...]]
) -> dict[str, PlacedExperts]:
    """Module -> where its experts are best placed, of those where that is worth it and possible."""
    found = dict[str, PlacedExperts]()
    for module, shares in query.expert_load.items():
        ranks = expert_ranks(plan, module)
        if not ranks or len(shares) % math.prod(ranks):
            continue
        travel = [0.0 if expert in copies.get(module, ()) else share for expert, share in enumerate(shares)]
        placed = placed_experts(travel, ranks)
        if placed.moves and _may_lie_so(query, plan, module, placed.order):
            found[module] = placed
    return found


def _may_lie_so(query: Query, plan: Plan, module: str, order: tuple[int, ...]) -> bool:
    try:
        order_of_parameters(plan.with_(expert_order={module: order}), query.program)
    except PlanMismatchError as why:
        log.info("experts stay in their order: %s", why)
        return False
    return True


def placement_note(placed: Mapping[str, PlacedExperts]) -> str:
    """What an order of experts gains, of the layer whose busiest rank has most rows; those of copies do not count."""
    worst = max(placed, key=lambda module: placed[module].busiest)
    each = placed[worst]
    return (
        f"experts placed by load in {len(placed)} layer{'s'[: len(placed) > 1]}: of the rows of {worst or 'the model'} "
        f"the busiest rank gets {each.busiest:.1%}, in the model's order {each.before:.1%}, in any at least "
        f"{each.bound:.1%}"
    )

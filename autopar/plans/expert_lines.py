"""Lines that say where a plan places experts, and what that is good for.

    experts of layers.0.experts on the ranks of their group: 0, 3 | 1-2; the busiest gets 50 % of its rows, 70 % in the
    model's order
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.plans.expert_placement import blocks, busiest_share, runs_of
from autopar.plans.parallelism import expert_ranks
from autopar.plans.plan_value import PlanValue

MOST_MODULES, MOST_RANKS = 4, 16
"""So many are listed; the file has them all."""


def expert_lines(plan: PlanValue) -> Iterator[str]:
    """One for every module with placed experts, the first ones."""
    for module, order in [*plan.expert_order.items()][:MOST_MODULES]:
        ranks = math.prod(expert_ranks(plan, module))
        if ranks > 1 and len(order) % ranks == 0:
            held = [runs_of(sorted(block)) for block in blocks(order, ranks)]
            more = f" | ... ({ranks} ranks)" * (ranks > MOST_RANKS)
            yield (
                f"experts of {module or 'the model'} on the ranks of their group: {' | '.join(held[:MOST_RANKS])}{more}"
                f"{_busiest(plan, module, order, ranks)}"
            )
    if len(plan.expert_order) > MOST_MODULES:
        yield f"and {len(plan.expert_order) - MOST_MODULES} more modules with placed experts (expert_order of the file)"


def _busiest(plan: PlanValue, module: str, order: tuple[int, ...], ranks: int) -> str:
    copies, load = plan.replicated_experts.get(module, ()), plan.expert_load.get(module)
    if load is None:
        return ""
    travel = [0.0 if expert in copies else share for expert, share in enumerate(load)]
    now, before = (busiest_share(travel, each, ranks) for each in (order, range(len(order))))
    what = "the rows without those of copies" if copies else "the rows"
    return f"; the busiest gets {now:.0%} of {what}, {before:.0%} in the model's order"

"""The next GiB: what one more GiB of memory per device would buy, in seconds of a step at the prices of the plan.

    the dual price    what the memory rows of the plan's own solve say at the margin: the sum of their multipliers,
                      seconds per byte, times a GiB, and no more than memory without a limit would buy
    at most           proven by the same multipliers: no plan within a GiB more, of the same rows, saves more
    solved again      what the best plan that was found within a GiB more saves; `explain` solves, and says so

Multipliers bend the bound of a solve, so the bound within a GiB more lies above `bound - price`: hence the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from autopar.plans.plan_text import format_seconds
from autopar.plans.plan_value import PlanValue

GIB = float(1 << 30)
DUAL_PRICE, AT_MOST = "next_gib_seconds", "next_gib_at_most_seconds"
"""Where a plan's statistics hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGib:
    """Seconds per step that one more GiB of memory per device saves. dual_seconds, at_most_seconds: of the plan's own
    solve (None where no memory row was part of it); found_seconds: of the best plan of a solve within a GiB more."""

    dual_seconds: float | None = None
    at_most_seconds: float | None = None
    found_seconds: float | None = None

    def __str__(self) -> str:
        said = []
        if self.found_seconds is not None:
            said.append(f"{format_seconds(self.found_seconds)} less per step, solved again")
        if self.dual_seconds is not None:
            said.append(f"about {format_seconds(self.dual_seconds)} less per step by the dual price of the solve")
        if self.at_most_seconds is not None:
            said.append(f"at most {format_seconds(self.at_most_seconds)}")
        return f"one GiB more of memory per device: {'; '.join(said)}"

    def document(self) -> dict[str, float | None]:
        """As JSON values."""
        return asdict(self)


def next_gib_of(plan: PlanValue) -> NextGib | None:
    """What the plan says; None where memory rows were no part of its solve."""
    dual, most = plan.statistics.get(DUAL_PRICE), plan.statistics.get(AT_MOST)
    if not isinstance(dual, int | float) or not isinstance(most, int | float):
        return None
    return NextGib(dual_seconds=float(dual), at_most_seconds=float(most))


def next_gib_statistics(
    objective: float, proven_bound: float, seconds_per_byte: float, free_bound: float
) -> Mapping[str, float]:
    """For a plan's statistics. proven_bound: of the certificate whose multipliers add up to `seconds_per_byte`;
    free_bound: of all plans, whatever they hold."""
    price = seconds_per_byte * GIB
    return {
        DUAL_PRICE: min(price, max(0.0, objective - free_bound)),
        AT_MOST: max(0.0, objective - max(free_bound, proven_bound - price)),
    }

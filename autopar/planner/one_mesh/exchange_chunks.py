"""Chunks of exchanges: how layers of experts run whose rows travel, by playing the step of each way.

    whole 81.8 ms, in turns 78.1, 2 chunks 69.5, 4 chunks 70.8      ->  product_chunks {"all_to_all": 2}

In turns, rows go back before what stays is computed (gradients of weights); in chunks of their tokens, those of one
also travel beside the products of another (`passes/kernels/chunked_layer.py`). Smaller messages, more kernels and sums
of gradients are in the program that is played. Each way is lowered for itself, since what forward saves differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.planner.one_mesh.bucket_sizes import LEAST_GAIN
from autopar.planner.problem.prices import Floats
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import EXCHANGES
from autopar.plans.plan_text import format_seconds

COUNTS = (1, 2, 4)
"""Chunks that are tried behind the whole, while more make the step shorter; one is the whole in turns."""
Played = tuple[Plan, Floats]


def in_exchange_chunks(whole: Played, play: Callable[[Plan], Played], budget_bytes: float) -> Played:
    """A plan with its prediction and what that measured, in as many chunks as make the step shortest.

    whole: as lowered without; play: of a plan without a prediction. Chunks that do not fit, or that save less of the
    step than `LEAST_GAIN`, are none.
    """
    seconds = {0: whole[0].predicted.step_seconds}
    best, least = whole, LEAST_GAIN * seconds[0]
    if whole[0].predicted.exposed_communication_seconds < least:
        return whole
    for count in COUNTS:
        found = play(in_chunks(whole[0], count))
        seconds[count] = found[0].predicted.step_seconds
        is_shorter = seconds[count] < best[0].predicted.step_seconds - least
        if is_shorter and found[0].predicted.peak_bytes <= budget_bytes:
            best = found
        elif count > 1:
            break
    count = best[0].product_chunks.get(EXCHANGES, 0)
    return (replace(best[0], notes=(*best[0].notes, _note(count, seconds))), best[1]) if count else whole


def in_chunks(plan: Plan, count: int) -> Plan:
    """The plan whose layers run in so many chunks, which says nothing else of how it is issued."""
    return replace(plan, product_chunks={EXCHANGES: count})


def _note(count: int, seconds: Mapping[int, float]) -> str:
    """What was chosen, and what each way takes."""
    names = {0: "as they come", 1: "back before gradients of weights"}
    said = ", ".join(f"{names.get(one, f'{one} chunks')} {format_seconds(each)}" for one, each in seconds.items())
    chosen = names.get(count, f"in {count} chunks of their tokens")
    return f"rows of experts travel {chosen}: the shortest played step, but for less than {LEAST_GAIN:.0%} ({said})"

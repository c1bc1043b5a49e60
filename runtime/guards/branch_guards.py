"""Branch guards: what Python read at capture must be so in every call (`branches="example"`).

    capture:  if h.isfinite().all(): ...     took the branch of True
    call 7:   the guard computes False       BranchError on every rank: net.py:12 (if ...) read True, False now

Guards lie whole on every rank. They are read behind the forward and before anything is handed out or written to a
buffer; where only one rank sees a difference, the others are told.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.errors import BranchError
from autopar.program import Guard, Output
from autopar.runtime.consensus import attempt_on_all

_SHOWN = 3
"""Lines that a message names; the first one may have caused the others."""


def check_branches(
    guards: Sequence[Guard], outputs: Sequence[Output], results: Sequence[torch.Tensor], act: str
) -> None:
    """Raises BranchError, on every rank, where a call named `act` does not go the way that was captured."""
    if not guards:
        return
    computed = dict(zip((output.name for output in outputs), results, strict=True))
    attempt_on_all(lambda: _refuse(list(_broken(guards, computed)), act), "the branches of a call")


def _broken(guards: Sequence[Guard], computed: dict[str, torch.Tensor]) -> Iterator[tuple[Guard, str]]:
    for guard in guards:
        value = computed[guard.name].tolist()
        said = _difference(guard, value)
        if said:
            yield guard, said


def _difference(guard: Guard, value: Any) -> str:
    """What a value changes, in words; empty where it changes nothing."""
    if not guard.asked:
        return "" if _is_same(value, guard.value) else f"read {guard.value}, {value} now"
    for asked in guard.asked:
        if getattr(operator, asked.operator)(value, asked.other) != asked.answer:
            return f"read {guard.value}, {value} now, which lies on the other side of {asked.other}"
    return ""


def _is_same(value: Any, old: Any) -> bool:
    return bool(value == old) or (value != value and old != old)  # NaN


def _refuse(broken: Sequence[tuple[Guard, str]], act: str) -> None:
    if not broken:
        return
    lines = "; ".join(f"{guard.place} {said}" for guard, said in broken[:_SHOWN])
    more = f" (and {len(broken) - _SHOWN} more)" if len(broken) > _SHOWN else ""
    step = _next_step(broken[0][0])
    raise BranchError(f"{act} takes another branch than the example inputs did: {lines}{more}. {step}")


def _next_step(guard: Guard) -> str:
    if guard.is_drawn:
        return (
            "A random draw decides there, and a plan has one graph: set the probability to 0 (layerdrop=0.0), or "
            "choose with torch.where"
        )
    return (
        "Nothing was changed by this call: leave such a batch out, compile a second module from an example that goes "
        "this way, or choose with torch.where, which keeps one graph"
    )

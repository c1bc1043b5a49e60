"""A plan and the program of a rank as text that people can compare line by line.

What may differ without another choice is left out: counts of the search, and hashes of prices, whose last digits are
the processor's; numbers have six digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION, DEVICE, WHOLE
from tests.golden.cases import Case

LEFT_OUT = frozenset({"statistics", "prices_hash", "notes"})
"""The summary has the notes."""
DIGITS = 6
ROUNDING = 1e-12
"""Seconds and shares below this are what is left of sums that cancel."""


def texts(case: Case) -> dict[str, str]:
    """File name -> text: `plan.txt`, and `rank_0.txt` for every rank that the case names."""
    torch.manual_seed(0)
    model, inputs = case.build()
    question = {"mode": "fast", **case.question}
    planner = autopar.Planner(model, inputs, cluster=case.cluster, optimizer=torch.optim.AdamW, **case.planner)
    plan = planner.plan(**question)
    found = {"plan.txt": plan_text(plan)}
    for rank in case.ranks:
        found[f"rank_{rank}.txt"] = f"{plan.code(rank).text}\n"
    return found


def plan_text(plan: Plan) -> str:
    """The plan on one page as `summary` prints it, then what its file says, one line per entry."""
    fields = msgspec.json.decode(plan.to_json())
    lines = [plan.with_(statistics={}).summary()]
    for name, value in fields.items():
        if name not in LEFT_OUT:
            lines += ["", *_lines(name, value)]
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping | list) or not value:
        yield f"{name} = {_text(value)}"
        return
    yield f"{name}:"
    for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield f"    {key}: {_text(entry)}"


def _text(value: Any) -> str:
    """A JSON value in one line; entries of objects that say nothing are left out."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(entry)}" for key, entry in value.items() if not _is_empty(entry)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, float):
        return f"{value if abs(value) > ROUNDING else 0.0:.{DIGITS}g}"
    return str(value)


def _is_empty(entry: Any) -> bool:
    says_nothing = entry is None or entry is False or entry in (DEFAULT_IMPLEMENTATION, DEVICE, WHOLE)
    return says_nothing or (isinstance(entry, list | Mapping) and not entry)

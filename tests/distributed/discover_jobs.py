"""Jobs of the workers that look for the rules of an operator, or run a plan that brings them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.rules import engine, learning
from tests.distributed.training_jobs import largest_error
from tests.distributed.uncovered import UncoveredModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """error: of the largest gradient, relative; axes: of the calls of the operator; uncovered: operators without a
    rule; searched: calls for which this rank looked for a rule; plan: as JSON."""

    error: float
    axes: tuple[tuple[str | None, ...], ...]
    uncovered: tuple[str, ...]
    rules: dict[str, str | None]
    searched: int
    plan: bytes


def discover(cache: str, plan: bytes | None, wrong: dict[str, str], **options: Any) -> Discovered | str:
    """The model with an operator that has no rule, in a process that knows of none. plan: to run under; wrong: call ->
    rule that rank 0 believes to have found."""
    torch.manual_seed(0)
    model, x = UncoveredModel(), torch.randn(8, 8)
    reference = copy.deepcopy(model)
    with (
        _knowing_nothing(cache),
        mock.patch.object(
            learning, "rule_by_execution", side_effect=_found(wrong) if wrong else learning.rule_by_execution
        ) as search,
    ):
        given = None if plan is None else Plan.from_json(plan)
        try:
            module = autopar.compile(model, (x,), plan=given, **options)
        except autopar.AutoparError as error:
            return f"{type(error).__name__}: {error}"
        module(x).backward()
        reference(x).backward()
        return Discovered(
            error=largest_error(module, reference),
            axes=tuple(entry.axes for name, entry in module.plan.operators.items() if "cube" in name),
            uncovered=tuple(module.plan.uncovered),
            rules=dict(module.plan.discovered),
            searched=search.call_count,
            plan=module.plan.to_json(),
        )


def _found(wrong: dict[str, str]) -> Any:
    return lambda call: (wrong[str(call.target)], "")


@contextmanager
def _knowing_nothing(cache: str) -> Iterator[None]:
    """Rules that were discovered before are forgotten, and those of this job behind it."""
    folder = {"AUTOPAR_CACHE": str(Path(cache) / str(dist.get_rank()))}
    with mock.patch.dict("os.environ", folder), mock.patch.object(engine, "_DISCOVERED", {}):
        engine.rule_of.cache_clear()
        yield
    engine.rule_of.cache_clear()

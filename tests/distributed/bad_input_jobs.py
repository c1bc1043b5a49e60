"""Jobs of the workers that plan from a file that somebody edited, or run a model with an unknown operator."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autopar
from tests.distributed.captured_once import compile_once, prepared_by
from tests.distributed.models import captured_tied, tied_model, tokens
from tests.distributed.training_jobs import largest_error
from tests.distributed.uncovered import UncoveredModel

Document = dict[str, Any]


def _flip_output(document: Document) -> None:
    """One matmul promises an output in a layout that its operands do not give."""
    document["operators"]["block.0/mm#0"]["outputs"] = [["P(sum)"]]


def _flip_axes(document: Document) -> None:
    document["operators"]["block.0/mm#0"]["axes"] = ["q"]


def _drop_operator(document: Document) -> None:
    del document["operators"]["block.0/mm#0"]


def _drop_parameter(document: Document) -> None:
    del document["parameters"]["block.0.weight"]


def _impossible_parameter(document: Document) -> None:
    document["parameters"]["block.0.weight"].update(stored=["S(3)"], used=["S(3)"], gradient=["S(3)"])


def _too_many_axes(document: Document) -> None:
    document["parameters"]["block.0.weight"]["stored"] = ["R", "R"]


EDITS: dict[str, Callable[[Document], None]] = {
    edit.__name__.strip("_"): edit
    for edit in (_flip_output, _flip_axes, _drop_operator, _drop_parameter, _impossible_parameter, _too_many_axes)
}


@prepared_by(captured_tied)
def edited_plan(path: str, edit: str) -> str:
    """The error of a saved plan after one edit; every rank edits its own copy."""
    plan = compile_once("tied model", tied_model(), tokens(0), dims={"tp": 4}).plan
    document = json.loads(plan.to_json())
    EDITS[edit](document)
    file = Path(f"{path}-{torch.distributed.get_rank()}.json")
    file.write_text(json.dumps(document))
    return _error_of(lambda: compile_once("tied model", tied_model(), tokens(0), plan=file))


def world_size_error(path: str) -> str:
    """The error of a plan for four processes on fewer."""
    return _error_of(lambda: compile_once("tied model", tied_model(), tokens(0), plan=path))


@prepared_by(captured_tied)
def save_plan(path: str) -> None:
    """Write the plan of four processes."""
    plan = compile_once("tied model", tied_model(), tokens(0), dims={"dp_shard": 4}).plan
    if torch.distributed.get_rank() == 0:
        plan.save(path)


@prepared_by(captured_tied)
def impossible(options: dict[str, Any]) -> str:
    """The error of an impossible request; rank 0 plans, all ranks must raise."""
    return _error_of(lambda: compile_once("tied model", tied_model(), tokens(0), **options))


@prepared_by(captured_tied)
def damaged_file(path: str) -> str:
    """The error where the plan file of one rank is damaged."""
    plan = compile_once("tied model", tied_model(), tokens(0), dims={"dp_shard": 4}).plan
    rank = torch.distributed.get_rank()
    file = Path(f"{path}-{rank}.json")
    file.write_bytes(plan.to_json()[: -10 if rank == 1 else None])
    return _error_of(lambda: compile_once("tied model", tied_model(), tokens(0), plan=file))


@prepared_by(captured_tied)
def different_plans(path: str) -> str:
    """The error where one rank is given another plan than the others."""
    rank = torch.distributed.get_rank()
    asked = ({"dp_shard": 4}, {"tp": 4})
    plans = [compile_once("tied model", tied_model(), tokens(0), dims=dims).plan for dims in asked]
    return _error_of(lambda: compile_once("tied model", tied_model(), tokens(0), plan=plans[rank == 3]))


def uncovered(dims: dict[str, int]) -> tuple[float, list[str], float]:
    """Gradient error, uncovered operators and their cost of a model with an operator that has no rule."""
    torch.manual_seed(0)
    model, x = UncoveredModel(), torch.randn(8, 8)
    reference = copy.deepcopy(model)
    module = autopar.compile(model, (x,), dims=dims)
    module(x).backward()
    reference(x).backward()
    return largest_error(module, reference), list(module.plan.uncovered), sum(module.plan.uncovered.values())


def uncovered_strict() -> str:
    """The error of the same with strict=True."""
    return _error_of(lambda: autopar.compile(UncoveredModel(), (torch.randn(8, 8),), strict=True))


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except autopar.AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""

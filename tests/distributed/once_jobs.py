"""Jobs of the workers: steps in parts whose parameters are gathered, and gradients summed, once per step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

import autopar
from autopar.runtime.pipeline.stage_passes import StageGraphs
from benchmarks.storages import StorageTracker
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.models import TiedModel, tied_model, tokens
from tests.distributed.training_jobs import largest_error

PARTS = 3
BATCH = 12


def _model() -> TiedModel:
    """Tied weights, a frozen bias and a buffer, in double precision."""
    return tied_model().double()


def captured(**_: Any) -> bool:
    """Capture the model in its micro-batches, and for evaluation."""
    return capture_once("tied in double", _model(), tokens(0, BATCH), parts=PARTS, evaluates=True)


@prepared_by(captured)
def train(meshes: list[dict[str, int]], mutation: str | None = None) -> dict[str, float]:
    """The largest error of losses and gradients over three steps on every mesh, in evaluation, and of a step whose
    first half `no_sync` held, beside the plain model; under plans that gather once and that do not."""
    found = {}
    for dims in meshes:
        module = compile_once("tied in double", _model(), tokens(0, BATCH), dims=dims, micro_batches=PARTS)
        for once in (False, True):
            plan = module.plan.with_(gather_once=once)
            with MUTATIONS[mutation]() if mutation else ExitStack():
                found[f"{dims} {once}"] = _errors(plan)
    return found


def _errors(plan: Any) -> float:
    reference = _model()
    module = compile_once("tied in double", copy.deepcopy(reference), tokens(0, BATCH), plan=plan)
    assert module.plan.gather_once == plan.gather_once
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3, momentum=0.9) for each in (module, reference)]
    errors = []
    for step in range(3):
        losses = [each(**tokens(step, BATCH))["loss"] for each in (module, reference)]
        for loss in losses:
            (loss * 8.0).backward()
        errors += [_difference(*losses), largest_error(module, reference)]
        _update(optimizers)
    module.eval(), reference.eval()
    with torch.no_grad():
        errors.append(_difference(*(each(**tokens(5, BATCH))["loss"] for each in (module, reference))))
    module.train(), reference.train()
    with module.no_sync():
        module(**tokens(6, BATCH))["loss"].backward()
    module(**tokens(7, BATCH))["loss"].backward()
    for seed in (6, 7):
        reference(**tokens(seed, BATCH))["loss"].backward()
    return max(*errors, largest_error(module, reference))


def _difference(mine: torch.Tensor, plain: torch.Tensor) -> float:
    return abs(float(mine.detach()) - float(plain.detach()))


def _update(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _stale() -> Any:
    """What the first step gathered is used in all others."""
    run, kept = StageGraphs.run_forward, dict[int, list[torch.Tensor]]()

    def mutated(self: StageGraphs, values: Mapping[str, torch.Tensor], prepared: list[Any], *rest: Any) -> Any:
        if self.first is not None and not prepared and id(self) in kept:
            prepared += kept[id(self)]
        result = run(self, values, prepared, *rest)
        kept[id(self)] = list(prepared)
        return result

    with mock.patch.object(StageGraphs, "run_forward", mutated):
        yield


@contextmanager
def _unsummed() -> Any:
    """The last backward adds to totals, and nothing sums them over the ranks."""
    run, end = StageGraphs.run_last, StageGraphs.run_ending
    partial: dict[int, dict[int, torch.Tensor]] = {}

    def kept(self: StageGraphs, saved: Any, prepared: Any, totals: Any, *rest: Any) -> Any:
        partial[id(self)] = dict(totals)
        return run(self, saved, prepared, totals, *rest)

    def mutated(self: StageGraphs, started: list[Any]) -> dict[str, torch.Tensor]:
        whole = {self.gradients[index]: total for index, total in partial.pop(id(self)).items()}
        return {n: whole[n] if whole[n].shape == value.shape else value for n, value in end(self, started).items()}

    with mock.patch.object(StageGraphs, "run_last", kept), mock.patch.object(StageGraphs, "run_ending", mutated):
        yield


MUTATIONS: dict[str, Callable[[], Any]] = {"stale weights": _stale, "totals that nobody sums": _unsummed}


class Wide(nn.Module):
    """Layers whose parameters are larger than what they make of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def captured_wide(**_: Any) -> bool:
    """Capture the wide model in its micro-batches."""
    return capture_once("wide", Wide(), _rows(), parts=PARTS)


def _rows() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(48, 256, generator=torch.Generator().manual_seed(0))}


def wide_plans(dims: dict[str, int]) -> list[autopar.Plan]:
    """One that gathers in every part, and one that gathers once, in the same layouts."""
    model = Wide()
    plan = autopar.plan(
        model, _rows(), dims=dims, cluster="2x1 cpu", micro_batches=PARTS, optimizer=torch.optim.SGD, mode="fast",
        with_baselines=False,
    )
    return [plan.edit({"gather_once": once}) for once in (False, True)]


@prepared_by(captured_wide)
def counted_bytes(plans: list[str]) -> list[float]:
    """The most bytes that are counted in a step under each of some plans."""
    found = []
    for text in plans:
        torch.manual_seed(0)
        module = compile_once("wide", Wide(), _rows(), plan=autopar.Plan.from_json(text))
        module(**_rows()).backward()
        module.zero_grad()
        inputs = _rows()
        with StorageTracker([*module.parameters(), *inputs.values()]) as tracker:
            module(**inputs).backward()
        found.append(float(tracker.peak_bytes))
    return found

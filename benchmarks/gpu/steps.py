"""Training steps of one model: under autopar, under torch.compile and eager, with the predicted beside the measured.

Last comes autopar with CUDA graphs: a stage that it ends has the other rows. All train the same weights on the same
batch in bf16 from fp32 parameters, with a fused AdamW: plain modules under torch.autocast, ours under precision="bf16".
The plan is the one that was carried; where it does not fit the graph that this torch captures, or none was carried, the
plan is made here, which on one device needs no solver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.step import replayed_graphs
from benchmarks.gpu.models import MODELS, Made
from benchmarks.gpu.stage import Place, Row, attempted
from benchmarks.gpu.timing import busiest_kernels, free_memory, measured_steps
from benchmarks.plan_quality.settings import Inputs

LEARNING_RATE = 1e-4
FIRST_STEPS = 2
"""What compiles, and what makes the optimizer's state."""


def plan_path(folder: Path, cluster: Cluster, name: str, *, tiny: bool) -> Path:
    """Where the plan of a model for such devices is carried; name: of the model, with what is asked beside it."""
    return folder / cluster.device.name / f"{name}{'-tiny' if tiny else ''}.plan.json"


def run(place: Place, model: str, steps: int, backend: str, graphs: bool) -> Iterator[Row]:
    """A row for each of the three, what they are to each other, CUDA graphs. backend: of torch.compile; graphs: whether
    CUDA graphs are tried, which matter to short steps alone."""
    ways: dict[str, Callable[[], Row]] = {
        "autopar": lambda: ours(place, model, steps),
        "torch.compile": lambda: plain(place, model, steps, lambda module: torch.compile(module, backend=backend)),
        "eager": lambda: plain(place, model, steps, lambda module: module),
    }
    rows = {}
    for name, way in ways.items():
        yield (row := attempted(name, way))
        if "seconds" in row:
            rows[name] = row
        free_memory(place.device)
    if "autopar" in rows:
        yield compared(rows)
        if graphs:
            yield attempted("cuda graphs", lambda: replayed(place, model, steps, rows["autopar"]))


def compared(rows: dict[str, Row]) -> Row:
    """Ours to the others: how many times as fast, of how many bytes, how far the first loss is apart."""
    mine, row = rows["autopar"], {"case": "compared"}
    for other, word in (("torch.compile", "compile"), ("eager", "eager")):
        if other in rows:
            row[f"speed_of_{word}"] = rows[other]["seconds"] / mine["seconds"]
            row[f"bytes_of_{word}"] = mine["peak_bytes"] / rows[other]["peak_bytes"]
            row[f"loss_beside_{word}"] = mine["first_loss"] - rows[other]["first_loss"]
    return row


def replayed(place: Place, name: str, steps: int, run: Row) -> Row:
    """Under autopar with CUDA graphs, and how many times as fast that is as the `run` without. refused: why graphs are
    not recorded, as in a rehearsal."""
    warnings = Warnings()
    replayed_graphs.log.addHandler(warnings)
    try:
        module, inputs, plan_source = compiled(place, name, lambda: _mixed(place, name, cuda_graphs=True))
        found = trained(place, module, lambda: module(**inputs), steps)
    finally:
        replayed_graphs.log.removeHandler(warnings)
    speed, apart = run["seconds"] / found["seconds"], found["first_loss"] - run["first_loss"]
    return {**found, "plan": plan_source, "speed_of_run": speed, "loss_beside_run": apart, "refused": warnings.lines}


class Warnings(logging.Handler):
    """The lines of a log that warn."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(record.getMessage())


def ours(place: Place, name: str, steps: int) -> Row:
    """Under autopar, with the prediction of its plan."""
    module, inputs, plan_source = compiled(place, name, lambda: _mixed(place, name))
    plan = module.plan
    assert isinstance(plan, Plan)
    found = trained(place, module, lambda: module(**inputs), steps)
    predicted = plan.predicted
    return {
        **found,
        "plan": plan_source,
        "cluster": plan.cluster,
        "prices": plan.profile,
        "kernel_backend": plan.kernel_backend,
        "kernels": list(plan.kernels),
        "predicted_seconds": predicted.step_seconds,
        "predicted_peak_bytes": predicted.peak_bytes,
        "predicted_bytes_by_kind": dict(predicted.bytes_by_kind),
        "step_error": abs(predicted.step_seconds / found["seconds"] - 1),
        "peak_error": abs(predicted.peak_bytes / found["peak_bytes"] - 1),
    }


def compiled(place: Place, name: str, make: Callable[[], tuple[Made, Asked]]) -> tuple[ParallelModule, Inputs, str]:
    """The module, its inputs, and whose plan it is. name: of the plan; make: a new model, and what is asked of it."""
    path, why = None, "nothing was carried"
    if place.carried is not None:
        path = plan_path(place.carried, Cluster.detect(1), name, tiny=place.rehearse)
        why = f"there is no {path}"
    if path is not None and path.exists():
        made, asked = make()
        try:
            return autopar.compile(made.model, dict(made.inputs), plan=path, **asked), made.inputs, "carried"
        except AutoparError as error:
            why = str(error)
    made, asked = make()
    return autopar.compile(made.model, dict(made.inputs), **asked), made.inputs, f"made here: {why}"


def _mixed(place: Place, name: str, **further: Any) -> tuple[Made, Asked]:
    return MODELS[name].made(place.device, tiny=place.rehearse), {**MIXED, **further}


Asked: TypeAlias = dict[str, Any]
MIXED: Asked = {"optimizer": torch.optim.AdamW, "precision": "bf16", "mode": "fast"}
"""What is asked of a plan for one device."""


def plain(place: Place, name: str, steps: int, wrapped: Callable[[nn.Module], Callable[..., Tensor]]) -> Row:
    """The module as torch runs it; does_not_fit: that the device's memory is too small for it, instead of figures."""
    made = MODELS[name].made(place.device, tiny=place.rehearse)
    call = wrapped(made.model)

    def loss() -> Tensor:
        with torch.autocast(place.device.type, torch.bfloat16):
            return call(**made.inputs)

    try:
        return trained(place, made.model, loss, steps)
    except torch.OutOfMemoryError as error:
        return {"does_not_fit": str(error).splitlines()[0]}


def trained(place: Place, module: nn.Module, loss_of: Callable[[], Tensor], steps: int) -> Row:
    """Steps of a module: the first loss, seconds and bytes, where the seconds go."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> Tensor:
        loss = loss_of()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first_loss = float(step())
    for _ in range(FIRST_STEPS - 1):
        step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    known = [*module.parameters(), *module.buffers(), *states]
    found = asdict(measured_steps(step, place.device, steps, known))
    return {"first_loss": first_loss, **found, "busiest": busiest_kernels(step, place.device)}

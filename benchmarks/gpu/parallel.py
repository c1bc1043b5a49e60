"""One model on all devices of this machine: our plan of a kind against torch's own way to do the same.

    ddp      dims={"dp_replicate": n}    DistributedDataParallel
    fsdp2    dims={"dp_shard": n}        fully_shard of every layer
    tp       dims={"tp": n}              parallelize_module

Both train the same bf16 weights with SGD. A plan for several devices needs OR-tools: `--prepare` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autopar.plans.parallel_plan import Plan
from benchmarks.gpu.models import MODELS, Made
from benchmarks.gpu.ranks import num_ranks, on_ranks, slowest
from benchmarks.gpu.stage import Place, Row, attempted
from benchmarks.gpu.steps import FIRST_STEPS, Asked, compiled
from benchmarks.gpu.timing import measured_steps
from benchmarks.plan_quality.baselines.data_parallel import ddp, fsdp2
from benchmarks.plan_quality.baselines.tensor_parallel import tp
from benchmarks.plan_quality.baselines.trained import Trained, sgd, trained
from benchmarks.plan_quality.settings import Inputs

MODEL = "gpt2"
DIMS: Mapping[str, str] = {"ddp": "dp_replicate", "fsdp2": "dp_shard", "tp": "tp"}
TORCHS: Mapping[str, Callable[[torch.nn.Module, Inputs, int], Trained]] = {"ddp": ddp, "fsdp2": fsdp2, "tp": tp}


def plan_name(way: str, ranks: int) -> str:
    """Of the plan that is carried."""
    return f"{MODEL}-{way}-{ranks}"


def question(place: Place, way: str, ranks: int) -> tuple[Made, Asked]:
    """A new model in bf16, and what is asked of its plan."""
    made = MODELS[MODEL].made(place.device, tiny=place.rehearse)
    made.model.to(torch.bfloat16)
    return made, {"optimizer": torch.optim.SGD, "dims": {DIMS[way]: ranks}, "mode": "fast"}


def run(place: Place, ways: Sequence[str], steps: int, rehearsed_ranks: int) -> Iterator[Row]:
    """A row for each of `ways`."""
    ranks = num_ranks(place, rehearsed_ranks)
    for way in ways:
        yield attempted(way, partial(on_ranks, place, ranks, measured, way, ranks, steps))


def measured(place: Place, way: str, ranks: int, steps: int) -> Row:
    """On every rank: ours, then torch's."""
    module, inputs, plan_source = compiled(place, plan_name(way, ranks), lambda: question(place, way, ranks))
    mine = _figures(place, trained(module, inputs, sgd(module.parameters())), steps)
    plan = module.plan
    assert isinstance(plan, Plan)
    made, _ = question(place, way, ranks)
    theirs = _figures(place, TORCHS[way](made.model, made.inputs, ranks), steps)
    return {
        "ranks": ranks,
        "plan": plan_source,
        **mine,
        "torch_seconds": theirs["seconds"],
        "torch_peak_bytes": theirs["peak_bytes"],
        "speed_of_torch": theirs["seconds"] / mine["seconds"],
        "predicted_seconds": plan.predicted.step_seconds,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "step_error": abs(plan.predicted.step_seconds / mine["seconds"] - 1),
        "peak_error": abs(plan.predicted.peak_bytes / mine["peak_bytes"] - 1),
    }


def _figures(place: Place, run: Trained, steps: int) -> dict[str, Any]:
    for _ in range(FIRST_STEPS):
        run.step()
    found = measured_steps(run.step, place.device, steps, list(run.tensors()))
    return {"seconds": slowest(found.seconds, place.device), "peak_bytes": found.peak_bytes}

"""The floor under step time: five constants fitted on the measurements themselves, nothing of the program known.

    t = m max(FLOPs / (e peak), k layers) (1 + bubble)  +  tensor-parallel bytes / B_t  +  gradient bytes / B_d  +  o

e: fraction of the peak; k: least seconds of a layer; B_t, B_d: bytes/s of both rings; o: seconds of a step's end. Per
micro-batch of m; FLOPs and layers are those of one stage. A cost model that is worse than this on rows it has not seen
is worthless. Fitted by the same command that scores it, on every second group of the file, scored on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from benchmarks.validation.collectives import bus_factor
from benchmarks.validation.counts import model_flops, parameters
from benchmarks.validation.runs import TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Where the search begins: half the peak, 3 ms a layer, 100 GB/s, 25 GB/s, nothing at the end."""

    efficiency: float = 0.5
    layer_seconds: float = 3e-3
    tensor_rate: float = 100e9
    data_rate: float = 25e9
    end_seconds: float = 1e-3


STEPS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
"""Factors that a constant is tried with."""
ROUNDS = 20


def seconds(run: TrainingRun, constants: Constants) -> float:
    """Seconds of a step by the formula."""
    parallel, model = run.parallel, run.model
    again = 4 / 3 if parallel.recompute == "full" else 1.0
    peak = max(run.cluster.device.flops_per_second.values())
    devices = run.cluster.num_devices
    flops = again * model_flops(run) / parallel.micro_batches / devices
    layers = model.layers / parallel.pp
    micro_batch = max(flops / (constants.efficiency * peak), constants.layer_seconds * layers)
    border = 2.0 * parallel.micro_batch * model.seq_len * model.hidden
    if parallel.tp > 1:
        micro_batch += 6 * layers * bus_factor("all_reduce", parallel.tp) * border / constants.tensor_rate
    gradients = 2.0 * parameters(model).total / (parallel.tp * parallel.pp)
    reduced = bus_factor("all_reduce", parallel.dp) * gradients / constants.data_rate
    return (parallel.micro_batches + parallel.pp - 1) * micro_batch + reduced + constants.end_seconds


def fit(runs: Sequence[TrainingRun], measured: Sequence[float]) -> Constants:
    """Constants of the least median absolute percentage error, by coordinate search."""
    best = Constants()
    error = _error(runs, measured, best)
    for _ in range(ROUNDS):
        before = error
        for field in fields(Constants):
            for factor in STEPS:
                tried = replace(best, **{field.name: getattr(best, field.name) * factor})
                found = _error(runs, measured, tried)
                if found < error:
                    best, error = tried, found
        if error == before:
            break
    return best


def _error(runs: Sequence[TrainingRun], measured: Sequence[float], constants: Constants) -> float:
    told = np.array([seconds(run, constants) for run in runs])
    return float(np.median(np.abs(told / np.asarray(measured) - 1.0)))


def held_out(runs: Sequence[TrainingRun], measured: Sequence[float], groups: Sequence[tuple[str, ...]]) -> list[float]:
    """Predictions of all rows, each by constants that were fitted on the other half of the groups."""
    order = {group: number for number, group in enumerate(sorted(set(groups)))}
    side = [order[group] % 2 for group in groups]
    constants = [
        fit(
            [run for run, half in zip(runs, side, strict=True) if half != scored],
            [value for value, half in zip(measured, side, strict=True) if half != scored],
        )
        for scored in (0, 1)
    ]
    return [seconds(run, constants[half]) for run, half in zip(runs, side, strict=True)]

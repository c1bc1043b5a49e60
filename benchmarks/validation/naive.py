"""The baselines that every model here must beat: roofline, bus formula, 16 bytes a parameter, 6 N D, bubble formula.

    operator    max(FLOPs / peak, bytes / bandwidth)                               (operators.py)
    collective  bus factor x bytes / nominal bandwidth of the slowest link                       (collectives.py)
    memory      states of ZeRO + s b h (10 + 24 / t + 5 a s / (h t)) a layer       (Korthikanti et al. 2022, ZeRO)
    step        6 N D / (devices x peak) x (1 + bubble) + ring all-reduce          (8 N D with full recomputation)
    attention   FLOPs / (ranks x peak)                                             (rows_attention.py)
    pipeline    (p - 1) / (m + p - 1), divided by chunks; none for zero bubble

None of them has a fitted constant. The five-constant baseline of step time has: `five_constants.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from autopar.errors import AutoparError
from benchmarks.validation import collectives, operators, rows_attention
from benchmarks.validation.answers import FITS, GIB, MIB, OOM, step_values
from benchmarks.validation.counts import model_flops, parameters
from benchmarks.validation.fields import Row, Unpredictable, integer, number, text
from benchmarks.validation.rows import training_run
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Kind, Predicted, Schema


def naive(rows: Sequence[Row], schema: Schema, kind: Kind) -> list[Predicted]:
    """The naive prediction of every row."""
    if kind == "op":
        return operators.naive(rows, schema)
    if kind == "collective":
        return collectives.naive(rows, schema)
    answer = {
        "memory": _memory,
        "oom": _outcome,
        "step": _step,
        "pipeline": _pipeline,
        "attention": rows_attention.naive_values,
    }[kind]
    return [_answered(row, schema, answer) for row in rows]


def _answered(row: Row, schema: Schema, answer: Callable[[Row, Schema], Mapping[str, float | str]]) -> Predicted:
    try:
        return Predicted(values=answer(row, schema))
    except (AutoparError, Unpredictable) as error:
        return Predicted(reason=str(error))


def naive_bytes(run: TrainingRun) -> float:
    """Peak bytes of the first stage: 16 bytes a parameter, cut as ZeRO says, and activations by formula."""
    shape, parallel = run.model, run.parallel
    local = parameters(shape).total / (parallel.tp * parallel.pp)
    degree = parallel.dp * parallel.cp
    states = local * {0: 16.0, 1: 4 + 12 / degree, 2: 2 + 14 / degree, 3: 16 / degree}[parallel.zero_stage]
    sequence = parallel.micro_batch * shape.seq_len * shape.hidden / parallel.cp
    scores = 5 * shape.heads * shape.seq_len / shape.hidden if run.stack.attention == "unfused" else 0.0
    layer = sequence * (10 + (24 + scores) / parallel.tp)
    if parallel.sequence_parallel:
        layer = sequence * (34 + scores) / parallel.tp
    if parallel.recompute == "full":
        layer = 2 * sequence
    in_flight = min(parallel.pp, parallel.micro_batches)
    return states + layer * shape.layers / parallel.pp * in_flight


def _memory(row: Row, schema: Schema) -> Mapping[str, float | str]:
    if text(row, "quantity", "peak") not in ("peak", "act_peak"):
        raise Unpredictable("the naive formula gives the peak only")
    peak = naive_bytes(training_run(schema, row))
    units = {"B": 1.0, "GiB": GIB, "MiB": MIB, "MB": MIB, "GB": 1e9}
    return {column: peak / units[unit] for column, unit in schema.measured["memory"].items() if unit in units}


def _outcome(row: Row, schema: Schema) -> Mapping[str, float | str]:
    run = training_run(schema, row)
    return {"outcome": FITS if naive_bytes(run) <= run.cluster.device.memory_bytes else OOM}


def naive_seconds(run: TrainingRun) -> float:
    """6 N D over the measured peak of all devices, the bubble of 1F1B, ring all-reduces of tensors and gradients."""
    parallel, device = run.parallel, run.cluster.device
    rates = device.flops_per_second
    dtype = {"float8": "float8_e4m3fn", "float4": "float4_e2m1fn_x2"}.get(run.stack.dtype, run.stack.dtype)
    peak = rates.get(dtype) or rates.get("float16") or rates["float32"]
    again = 4 / 3 if parallel.recompute == "full" and run.training else 1.0
    compute = again * model_flops(run) / (run.cluster.num_devices * peak) + _tensor_rings(run)
    bubble = (parallel.pp - 1) / (parallel.micro_batches * parallel.virtual_stages)
    return compute * (1 + bubble) + _gradient_ring(run)


def _tensor_rings(run: TrainingRun) -> float:
    """Two all-reduces of the hidden states per layer in each of forward, backward and recomputation."""
    parallel, model = run.parallel, run.model
    if parallel.tp == 1:
        return 0.0
    passes = (2 if run.training else 1) + (parallel.recompute == "full")
    nbytes = 2.0 * parallel.micro_batch * model.seq_len * model.hidden * parallel.micro_batches
    layers = model.layers / parallel.pp
    ring = collectives.bus_factor("all_reduce", parallel.tp) * nbytes / run.cluster.intra_link.bytes_per_second
    return 2 * passes * layers * ring


def _gradient_ring(run: TrainingRun) -> float:
    """One all-reduce of a rank's gradients; a ring that has several ranks in a node uses the NICs of all of them."""
    parallel, cluster = run.parallel, run.cluster
    if parallel.dp == 1 or not run.training:
        return 0.0
    rate = cluster.intra_link.bytes_per_second
    if parallel.tp * parallel.dp > cluster.devices_per_node:
        ranks_in_node = max(1, min(parallel.dp, cluster.devices_per_node // parallel.tp))
        rate = min(rate, cluster.inter_link.bytes_per_second * ranks_in_node)
    local = parameters(run.model).total / (parallel.tp * parallel.pp)
    return collectives.bus_factor("all_reduce", parallel.dp) * local * run.stack.reduce_bytes / rate


def _step(row: Row, schema: Schema) -> Mapping[str, float | str]:
    return step_values(schema, row, training_run(schema, row), naive_seconds)


def _pipeline(row: Row, schema: Schema) -> Mapping[str, float | str]:
    """Bubble by formula, and samples per second of T_F + T_B + T_W for a micro-batch on each of p stages."""
    stages, micro_batches = integer(row, "pp_stages"), integer(row, "microbatches")
    bubble = (stages - 1) / (micro_batches + stages - 1)
    schedule = text(row, "schedule")
    if re.search(r"ZB", schedule):
        bubble = 0.0
    elif schedule.endswith("-I"):
        bubble = (stages - 1) / (micro_batches * 2 + stages - 1)
    busy = 1e-6 * sum(number(row, column) for column in ("T_F_us", "T_B_us", "T_W_us"))
    rate = integer(row, "micro_batch_seqs") / busy * (1 - bubble) / stages
    return {"bubble_rate_paper_tab5": bubble, "samples_per_gpu_per_s_tab4": rate}

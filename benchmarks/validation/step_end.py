"""The end of a step on one device: gradients of all its layers reduced, their norm, the optimizer, ZeRO's gather.

all-reduce or reduce-scatter of parameters x reduce_bytes      beside backward, where the stack does that
first and last stage of a tied embedding                       its gradient between the two
norm, zeroing, Adam                                            bytes of states over the memory's rate
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.collective_costs import CollectiveKind
from benchmarks.validation.links import collective, neighbour_seconds, slowed
from benchmarks.validation.published_plan import data_axis
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Tier


def step_end_seconds(run: TrainingRun, chunk: Sequence[str], elements: float, backward: float, tier: Tier) -> float:
    """What follows the last backward of one model chunk of `elements` parameters, whose backward takes `backward`
    seconds for a micro-batch."""
    stack, parallel = run.stack, run.parallel
    data = data_axis(parallel)
    replicas = parallel.dp * parallel.cp
    kind: CollectiveKind = "reduce_scatter" if parallel.zero_stage else "all_reduce"
    reduction = collective(run, kind, (data,), elements * stack.reduce_bytes)
    gather = 0.0
    if parallel.zero_stage in (1, 2):
        gather = collective(run, "all_gather", (data,), elements * stack.gather_bytes)
    passes = parallel.micro_batches if parallel.zero_stage == 3 else 1
    reduction *= passes
    if stack.overlap_gradients:
        beside = slowed(backward, reduction / passes, tier) - backward
        left = max(reduction - backward * passes, reduction / max(len(chunk), 1) / passes)
        reduction = left + beside * passes
    if stack.overlap_parameters:
        gather /= max(len(chunk), 1)
    reduction += _shared_table_seconds(run, chunk)
    updated = elements / ((parallel.zero_degree or replicas) if parallel.zero_stage else 1)
    return reduction + gather + optimizer_seconds(run, updated)


def _shared_table_seconds(run: TrainingRun, chunk: Sequence[str]) -> float:
    """First and last stage each hold a tied embedding and add up its gradients: 2 (n-1)/n = 1 times its bytes."""
    parallel, model = run.parallel, run.model
    if not model.tied_embeddings or parallel.pp == 1 or not {"embedding", "head"} & set(chunk):
        return 0.0
    nbytes = model.vocab * model.hidden / parallel.tp * run.stack.gradient_bytes
    return neighbour_seconds(run, nbytes, distance=parallel.tp * parallel.dp * parallel.cp * (parallel.pp - 1))


def optimizer_seconds(run: TrainingRun, elements: float) -> float:
    """Norm and Adam's step are bounded by memory: gradients are read twice and zeroed, states and weights rewritten."""
    stack = run.stack
    if not stack.optimizer_bytes:
        return 0.0
    traffic = 3 * stack.gradient_bytes + 2 * stack.optimizer_bytes + stack.parameter_bytes
    return elements * traffic / run.cluster.device.memory_bytes_per_second

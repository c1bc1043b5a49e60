"""Attention kernels where a rank holds a part of the sequence, and where layers attend to a window.

The program of a rank of context parallelism holds attention of its own part of the sequence to itself. The rank meets
the other parts one after the other: while it works on one, the next part of keys and values arrives. For c ranks

    seconds = c x kernel, or c - 1 hops where a hop takes longer than the kernel
"""

from __future__ import annotations

from autopar.cost_models.program_costs import ProgramAction
from benchmarks.validation.links import neighbour_seconds
from benchmarks.validation.runs import ModelShape, TrainingRun


def attention_seconds(run: TrainingRun, action: ProgramAction) -> float:
    """An attention kernel among its context-parallel ranks and windows.

    A rank of context parallelism holds a part of the queries and meets all keys, of which the graph counts its own
    only; while it works on one part, the next part of keys and values arrives (and, in backward, their gradients).
    """
    parallel, model = run.parallel, run.model
    compute = action.seconds * parallel.cp * attended_share(model)
    if parallel.cp == 1:
        return compute
    head = model.head_dim or model.hidden // model.heads
    width = (
        model.kv_heads * head * 2
        if model.latent is None
        else model.heads * (model.latent.nope_head + model.latent.rope_head + model.latent.value_head)
    )
    element = 4 if run.stack.dtype == "float32" else 2
    part = parallel.micro_batch * model.seq_len / parallel.cp * width / parallel.tp * element
    part *= 2 if "backward" in action.kind else 1
    hop = neighbour_seconds(run, part, distance=parallel.tp)
    return compute / parallel.cp + (parallel.cp - 1) * max(compute / parallel.cp, hop)


def attended_share(model: ModelShape) -> float:
    """Of the causal pairs of a layer, those that it meets in the mean where every other layer has a window."""
    if not 0 < model.window < model.seq_len:
        return 1.0
    window, length = model.window, model.seq_len
    return 0.5 + (window * length - window * window / 2) / length**2

"""What Megatron's BERT holds beside the graph.

Transformer Engine makes a full mask of the padded positions in every layer, one byte per pair, and the unfused softmax
keeps it for backward (its older releases took one mask for all layers). Its tests with tensor parallelism hold as much
as seven activations more than those without, 28 MiB in each of 12 rows on both devices and in all containers; which
tensors they are no source tells, so that they stand here as an allowance.
"""

from __future__ import annotations

from benchmarks.validation.runs import TrainingRun

UNTOLD_ACTIVATIONS = 7
"""(tokens, hidden) in 16 bits."""


def layer_mask_bytes(run: TrainingRun) -> int:
    """The mask that one layer keeps for a micro-batch."""
    parallel, shape = run.parallel, run.model
    if shape.family != "bert" or not run.stack.layer_masks:
        return 0
    return parallel.micro_batch * (shape.seq_len // parallel.cp) * shape.seq_len


def untold_bytes(run: TrainingRun) -> int:
    """The allowance for tensor parallelism."""
    parallel, shape = run.parallel, run.model
    if shape.family != "bert" or parallel.tp == 1 or run.stack.kernels != "megatron":
        return 0
    return 2 * UNTOLD_ACTIVATIONS * parallel.micro_batch * (shape.seq_len // parallel.cp) * shape.hidden

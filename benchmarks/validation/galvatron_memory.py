"""What Galvatron's layers keep, and when its FSDP gathers: one piece at a time, nothing ahead.

    forward of a piece       its weights whole
    backward of a piece      its weights and its gradients whole

Units are activations of a layer, (tokens, hidden) in 16 bits. The units below are inferred from Galvatron's profile of
Llama-2 7B, of which they are whole numbers; which tensors they are, its source files would have to tell.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.validation.program_memory import SegmentMemory
from benchmarks.validation.runs import TrainingRun

LAYER_INPUT_UNITS = 1
"""A second copy of what enters a layer, which recomputation keeps too."""
BATCHED_UNITS = 2
"""Copies that several sequences need, whose order is first turned around."""
HANDED_ON_UNITS = 2
"""What a stage in front of the last keeps of its result."""


def is_galvatron(run: TrainingRun) -> bool:
    """Whether the stack is Galvatron."""
    return run.stack.name == "galvatron"


def unit_bytes(run: TrainingRun) -> int:
    """One activation on one rank, cut by sequence parallelism."""
    shape, parallel = run.model, run.parallel
    return 2 * parallel.micro_batch * shape.seq_len * shape.hidden // parallel.tp


def narrower_norm_bytes(run: TrainingRun) -> int:
    """What the graph's norm keeps more: its normalised values in float32 in place of 16 bits."""
    return unit_bytes(run) if is_galvatron(run) else 0


def galvatron_kept_bytes(run: TrainingRun) -> int:
    """What one layer keeps beyond the graph: its input and, unless it is recomputed, another copy of gate and value and
    of the attention's result, less two narrower norms."""
    if not is_galvatron(run):
        return 0
    unit, parallel, shape = unit_bytes(run), run.parallel, run.model
    kept = LAYER_INPUT_UNITS * unit
    if parallel.recompute != "none":
        return kept
    gate_and_value = 4 * parallel.micro_batch * shape.seq_len * shape.ffn // parallel.tp
    batched = BATCHED_UNITS * unit if parallel.micro_batch > 1 else 0
    return kept + gate_and_value + unit + batched - 2 * narrower_norm_bytes(run)


def handed_on_bytes(run: TrainingRun) -> int:
    """What a stage that is not the last keeps of its result until backward."""
    return HANDED_ON_UNITS * unit_bytes(run) if is_galvatron(run) else 0


def gathers_by_piece(run: TrainingRun) -> bool:
    """Whether whole weights are held for the running piece alone."""
    return is_galvatron(run) and run.parallel.zero_stage == 3


def with_gathered(piece: SegmentMemory, run: TrainingRun) -> SegmentMemory:
    """The piece with its whole weights in forward, and its gradients too in backward."""
    outside = run.stack.whole_vocabulary and piece.name in ("embedding", "head")
    elements = piece.parameter_elements * (run.parallel.tp if outside else 1)
    weights = elements * run.stack.gather_bytes
    return replace(
        piece,
        forward_extra_bytes=piece.forward_extra_bytes + weights,
        backward_extra_bytes=piece.backward_extra_bytes + weights + elements * run.stack.reduce_bytes,
    )

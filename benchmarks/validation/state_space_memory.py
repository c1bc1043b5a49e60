"""What a Mamba-2 layer's fused kernel keeps, in place of what the operators of `state_space.py` would.

    kept        input, its norm, the result of the product in, y before and behind its gated norm, the product's input
    forward     x, B, C before and behind the convolution, states of chunks, products C B^T inside of chunks
    backward    all of these once more, with a gradient of each

The convolution and everything inside of chunks are computed again in backward (mamba_ssm/ops/triton/ssd_combined.py:
`MambaSplitConv1dScanCombinedFn.save_for_backward`; megatron/core/ssm/mamba_mixer.py: `_ssm_training`).
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.validation.program_memory import SegmentMemory
from benchmarks.validation.runs import StateSpace, TrainingRun
from benchmarks.validation.state_space import CHUNK


def with_fused_scan(piece: SegmentMemory, run: TrainingRun) -> SegmentMemory:
    """A segment as its fused kernel holds it; other segments than Mamba layers unchanged."""
    sizes = run.model.state_space
    if sizes is None or not any(".mamba." in name for name in piece.parameters):
        return piece
    tokens = run.parallel.micro_batch * (run.model.seq_len // run.parallel.cp)
    kept, inside = _kept_bytes(run, sizes, tokens), _inside_bytes(run, sizes, tokens)
    again = 0
    if run.parallel.recompute == "full":
        own = 2 * tokens * run.model.hidden // _sequence_parts(run)
        kept, again = own, kept - own
    cut = {name: size // run.parallel.tp if ".mamba." in name else size for name, size in piece.parameters.items()}
    return replace(
        piece,
        parameters=cut,
        parameter_elements=sum(cut.values()),
        saved_bytes=kept,
        forward_extra_bytes=again + inside,
        backward_extra_bytes=again + 2 * inside,
    )


def _sequence_parts(run: TrainingRun) -> int:
    return run.parallel.tp if run.parallel.sequence_parallel else 1


def _kept_bytes(run: TrainingRun, sizes: StateSpace, tokens: int) -> int:
    """From forward to backward of one micro-batch, the mask of the dropout behind the layer included. Three tensors as
    wide as y: before its norm, behind it, and with the sequence in front, as the product out reads it (two of them are
    in the sources; Megatron's tests hold three)."""
    inner = sizes.heads * sizes.head_dim
    product = 2 * inner + 2 * sizes.groups * sizes.state + sizes.heads
    mask = 1 if run.model.dropout else 0
    outside = (4 + mask) * tokens * run.model.hidden // _sequence_parts(run)
    return outside + 2 * tokens * (product + 3 * inner) // run.parallel.tp


def _inside_bytes(run: TrainingRun, sizes: StateSpace, tokens: int) -> int:
    """Of the convolution in 16 bits, of chunks in float32."""
    chunks = -(-tokens // CHUNK)
    channels = sizes.heads * sizes.head_dim + 2 * sizes.groups * sizes.state
    states = chunks * sizes.heads * sizes.head_dim * sizes.state
    products = chunks * sizes.groups * CHUNK**2
    return (2 * 2 * tokens * channels + 4 * (states + products)) // run.parallel.tp

"""What Megatron's fine-grained offloading leaves on the device (pipeline_parallel/fine_grained_activation_offload.py).

    what a layer saves below 2^20 elements, or outside of the offloaded modules      stays
    a layer in forward                  its own values, while those of the layer before still leave
    a layer in backward                 its own values, while those of the next are back already
    exchanges beside compute            a layer in forward and one in backward at once

A group keeps what was saved in it until it is asked for; the tests hold one activation per layer and micro-batch
between steps that nobody asked for (an allowance: 91 and 129 MiB measured, 96 and 112 counted).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from autopar.passes.module_segments import block_path
from benchmarks.validation.program_memory import SegmentMemory
from benchmarks.validation.runs import TrainingRun

_OFFLOADED = re.compile(r"layers\.\d+(/|\.norm|\.attention|\.mlp/)")


def waits_in_host_memory(operator: str) -> bool:
    """Whether what an operator's backward reads is offloaded: inputs of norms, attention and routed experts (Megatron's
    --offload-modules attn_norm, mlp_norm, qkv_linear, core_attn, attn_proj, expert_fc1, moe_act)."""
    return _OFFLOADED.match(operator) is not None


def beside_neighbour(piece: SegmentMemory, here: SegmentMemory, run: TrainingRun, routed: int) -> SegmentMemory:
    """A layer while another's values leave or are back; here: the layer without offloading, routed: what its experts
    save beyond the graph."""
    moved = here.saved_bytes - piece.saved_bytes + routed
    moved *= 2 if run.stack.overlap_exchanges else 1
    return replace(
        piece,
        forward_extra_bytes=piece.forward_extra_bytes + moved,
        backward_extra_bytes=piece.backward_extra_bytes + moved,
    )


def unclaimed_bytes(held: Sequence[SegmentMemory], run: TrainingRun) -> int:
    """What the layers of a rank hold between steps."""
    parallel, shape = run.parallel, run.model
    if not run.stack.offload_activations:
        return 0
    layers = sum(block_path(f"{piece.name}/") is not None for piece in held)
    tokens = parallel.micro_batch * (shape.seq_len // parallel.cp) // (parallel.tp if parallel.sequence_parallel else 1)
    return 2 * tokens * shape.hidden * layers * parallel.micro_batches

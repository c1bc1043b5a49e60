"""Multi-token prediction: a further layer behind the last, and a further pass through the head.

    hidden states, embedding of the next tokens -> two norms -> concatenated -> projection -> layer -> norm -> head

Its pieces are those of the model's last layer and head with what differs (megatron/core/transformer/
multi_token_prediction.py): the output's weight is shared, and a last pipeline stage has words of its own.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.validation.program_memory import SegmentMemory
from benchmarks.validation.runs import TrainingRun

KEPT_ACTIVATIONS = 3
"""The embedded tokens, and both norms' results side by side."""


def further_prediction(block: SegmentMemory, head: SegmentMemory, run: TrainingRun) -> list[SegmentMemory]:
    """The pieces of one prediction, in front of the head's own pass; block, head: the last layer and the head."""
    shape, parallel = run.model, run.parallel
    tokens = parallel.micro_batch * (shape.seq_len // parallel.cp) // (parallel.tp if parallel.sequence_parallel else 1)
    own = {
        "prediction.projection": 2 * shape.hidden**2 // parallel.tp,
        "prediction.norms": 3 * shape.hidden,
        "prediction.words": shape.vocab * shape.hidden // parallel.tp if parallel.pp > 1 else 0,
    }
    layer = replace(
        block,
        saved_bytes=block.saved_bytes + 2 * KEPT_ACTIVATIONS * tokens * shape.hidden,
        parameter_elements=block.parameter_elements + sum(own.values()),
        parameters={**block.parameters, **own},
    )
    return [layer, replace(head, parameter_elements=0, parameters={})]

"""What products in 8 and 4 bits cost beside themselves: casting their operands, and the products that stay in 16 bits.

A narrow product reads its input along rows and, in the product for the weight's gradient, along columns. So every input
of a forward product and every gradient that arrives at one is read in 16 bits and written twice, and read once more
where the scale must be known before:

    one scale of the tensor, from earlier steps    2 + 1 + 1 bytes an element
    one scale of the tensor, as it is              2 + 2 + 1 + 1
    one scale per row, in torch.compile's kernels  (2 + 1) along rows, (2 + 2 + 1) along columns
    one scale per 32 elements (MXFP8)              2 + 1 + 1 + 2/32
    one scale per 16 elements (NVFP4)              2 + 2 + 1/2 + 1/2 + 2/16

Transformer Engine's norms and activations hand on their results in few bits, so what follows them needs no cast.

The product with the vocabulary stays in 16 bits (Megatron's output layer is no layer of Transformer Engine; torchtitan
filters it). Weights are cast once a step or live in 8 bits, which is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cost_models.program_costs import ProgramAction
from benchmarks.validation.runs import Stack

CAST_BYTES: Mapping[str, float] = {
    "none": 0.0,
    "delayed": 4.0,
    "tensor": 6.0,
    "row": 8.0,
    "block32": 4.0 + 2 / 32,
    "block16": 5.0 + 2 / 16,
}
"""Moved per element of an operand, by `Stack.scaling`."""

WIDE_PARTS = ("head", ".router/")
"""Parts of the names of operators whose products stay in 16 bits."""

FUSED: Mapping[str, tuple[str, ...]] = {
    "forward": (".qkv/", ".query_down/", ".kv_down/", ".up/", ".down/"),
    "backward": (".up/",),
}
"""By pass: parts of the names of products whose input comes from a norm or an activation, or whose gradient does."""


def narrowed(
    narrow: Sequence[ProgramAction], wide: Sequence[ProgramAction], stack: Stack, bytes_per_second: float
) -> list[ProgramAction]:
    """The actions of one graph with casts: `narrow` and `wide` are the same actions with products priced in the stack's
    dtype and in 16 bits; the time of a cast is added to the product that it feeds."""
    seconds_per_element = CAST_BYTES[stack.scaling] / bytes_per_second
    fused = FUSED if stack.kernels == "megatron" else {}
    found = []
    for small, large in zip(narrow, wide, strict=True):
        if not small.operand_elements or any(part in small.name for part in WIDE_PARTS):
            found.append(large)
            continue
        handed_on = small.weight_only or any(part in small.name for part in fused.get(small.phase, ()))
        cast = 0.0 if handed_on else small.operand_elements * seconds_per_element
        found.append(replace(small, seconds=small.seconds + cast))
    return found

"""Sizes of published models by name, from `model_shapes.json`, and of unnamed ones from their parameter count.

model_named("LLAMA3_70B", seq_len=8192).hidden           # 8192
model_named("DeepSeekV3 (w/o MTP)", seq_len=4096)         # what stands in parentheses does not name the model
gpt_of_size(2651837440, seq_len=2048, vocab=50368)        # the GPT whose sizes give this count
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.validation.fields import Unpredictable
from benchmarks.validation.runs import ModelShape

GPT2_VOCAB = 50257
"""Tokens of GPT-2, before padding."""

_TABLE = Path(__file__).parent / "model_shapes.json"
_PADDING = 128
"""Megatron pads vocabularies to a multiple of this times tensor parallelism (make_vocab_size_divisible_by)."""


class _Entry(msgspec.Struct, frozen=True):
    source: str
    shape: dict[str, object]
    aliases: list[str] = []


@functools.cache
def _entries() -> dict[str, _Entry]:
    table = msgspec.json.decode(_TABLE.read_bytes(), type=dict[str, _Entry])
    return {_plain(known): entry for name, entry in table.items() for known in (name, *entry.aliases)}


def _plain(name: str) -> str:
    """Letters and digits of a name without its remarks: "DeepSeekV3 (w/o MTP)" is deepseekv3."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*?\)", "", name).lower())


@functools.cache
def model_named(name: str, seq_len: int) -> ModelShape:
    """The sizes of a published model. Raises Unpredictable for a name that the table lacks."""
    entry = _entries().get(_plain(name))
    if entry is None:
        raise Unpredictable(f"sizes of model {name!r} are not in the table of published models")
    shape = msgspec.convert({**entry.shape, "seq_len": seq_len}, ModelShape)
    return replace(shape, extra_predictions=0) if "w/o MTP" in name else shape


def padded_vocab(vocab: int, tensor_parallel: int, divisor: int = _PADDING) -> int:
    """Rows of Megatron's embedding: `vocab` up to a multiple of divisor x tensor parallelism."""
    multiple = divisor * tensor_parallel
    return -(-vocab // multiple) * multiple


def gpt_of_size(parameters: int, seq_len: int, vocab: int) -> ModelShape:
    """The GPT with tied embeddings and heads of 128 whose parameter count is nearest.

    12 L d^2 + 13 L d + (vocab + seq_len + 2) d, over widths of whole heads and depths of 64 to 200 in width / depth.
    """
    candidates = (
        (abs(_gpt_parameters(hidden, layers, seq_len, vocab) - parameters), abs(hidden - 112 * layers), hidden, layers)
        for hidden in range(256, 32769, 128)
        for layers in range(max(2, hidden // 200), hidden // 64 + 1)
    )
    _, _, hidden, layers = min(candidates)
    return ModelShape(
        family="gpt", hidden=hidden, ffn=4 * hidden, layers=layers, heads=hidden // 128, kv_heads=hidden // 128,
        vocab=vocab, seq_len=seq_len, tied_embeddings=True,
    )  # fmt: skip


def _gpt_parameters(hidden: int, layers: int, seq_len: int, vocab: int) -> int:
    return layers * (12 * hidden + 13) * hidden + (vocab + seq_len + 2) * hidden

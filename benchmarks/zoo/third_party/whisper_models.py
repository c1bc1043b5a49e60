"""openai-whisper: speech to text, as it was published."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from whisper.model import ModelDimensions, Whisper

from benchmarks.zoo.registry import Inputs, ZooEntry
from benchmarks.zoo.third_party.without_dropout import without_dropout

PACKAGES = ("whisper", "numba", "tiktoken")
TOKENS = 100


def _next_token(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output[:, :-1].transpose(1, 2), batch["tokens"][:, 1:])


def _whisper() -> nn.Module:
    """Its positions are what stood in memory: they come from a checkpoint."""
    model = Whisper(ModelDimensions(n_mels=8, n_vocab=TOKENS, **_SIZES))
    nn.init.normal_(model.decoder.positional_embedding, std=0.02)
    return without_dropout(model)


_SIZES: dict[str, Any] = {
    f"n_{side}_{name}": size
    for side in ("audio", "text")
    for name, size in (("ctx", 16), ("state", 32), ("head", 2), ("layer", 2))
}
ENTRIES = (
    ZooEntry(
        name="whisper/whisper",
        family="audio",
        build=_whisper,
        inputs=lambda batch: {"mel": torch.randn(batch, 8, 32), "tokens": torch.randint(0, TOKENS, (batch, 12))},
        loss_fn=_next_token,
    ),
)

"""openai-whisper: speech to text, as it was published."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from whisper.model import ModelDimensions, Whisper

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("whisper", "numba", "tiktoken")
TOKENS = 100


def _next_token(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output[:, :-1].transpose(1, 2), batch["tokens"][:, 1:])


_SIZES: dict[str, Any] = {
    f"n_{side}_{name}": size
    for side in ("audio", "text")
    for name, size in (("ctx", 16), ("state", 32), ("head", 2), ("layer", 2))
}
ENTRIES = (
    ZooEntry(
        name="whisper/whisper",
        family="audio",
        build=lambda: Whisper(ModelDimensions(n_mels=8, n_vocab=TOKENS, **_SIZES)),
        inputs=lambda batch: {"mel": torch.randn(batch, 8, 32), "tokens": torch.randint(0, TOKENS, (batch, 12))},
        loss_fn=_next_token,
    ),
)

"""Training data that every machine has: the source of the Python standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

TEXT_BYTES = 2_000_000


def library_text(num_bytes: int = TEXT_BYTES) -> torch.Tensor:
    """The first `num_bytes` of the standard library's modules in order of name, int64 in [0, 256)."""
    content = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        content += path.read_bytes()
        if len(content) >= num_bytes:
            break
    return torch.frombuffer(content[:num_bytes], dtype=torch.uint8).long()


def batch_at(text: torch.Tensor, step: int, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """The batch of a step, the same in every process: tokens (batch, sequence) and the bytes that follow them."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - sequence - 1, (batch, 1), generator=generator)
    window = text[starts + torch.arange(sequence + 1)]
    return {"tokens": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}

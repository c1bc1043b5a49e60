"""Checkpoints of one process; `tests/distributed/test_checkpoint.py` has those of several."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import autopar


def compiled() -> autopar.ParallelModule:
    return autopar.compile(nn.Linear(4, 4), torch.ones(2, 4), loss_fn=lambda output, batch: output.mean())


def test_a_seed_above_63_bits_is_kept(tmp_path: Path) -> None:
    module, again = compiled(), compiled()
    module.base_seed, module.calls = (1 << 63) + 12345, 3
    autopar.save(tmp_path / "checkpoint", module)
    autopar.load(tmp_path / "checkpoint", again)
    assert again.seed() == module.seed()

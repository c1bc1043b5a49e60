"""States: whole weights for the files of a framework, and autopar's checkpoints inside its folders.

    checkpoint-500/model.safetensors     whole weights, which from_pretrained reads
    checkpoint-500/autopar/              autopar.save: weights, optimizer, draws, in blocks; loads under another plan
    last.ckpt, last.autopar/             the same beside a framework's checkpoint that is a file
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from autopar.runtime.parallel_module import ParallelModule

FOLDER = "autopar"
"""Inside the folder of a framework's checkpoint: what `autopar.save` wrote."""


def folder_in(checkpoint: str | Path, number: int = 0) -> Path:
    """Where the state of the so-manieth module of a framework's checkpoint stands."""
    return Path(checkpoint) / (FOLDER if number == 0 else f"{FOLDER}-{number}")


def folder_beside(checkpoint: str | Path, number: int = 0) -> Path:
    """Where the state of the so-manieth module stands, of a framework's checkpoint that is a file."""
    file = Path(checkpoint)
    return file.with_name(f"{file.stem}.{folder_in('', number).name}")


def remove_beside(checkpoint: str | Path) -> None:
    """Remove what stands beside a file that the framework removes."""
    file = Path(checkpoint)
    for folder in (folder_beside(file), *file.parent.glob(f"{folder_beside(file).name}-*")):
        shutil.rmtree(folder, ignore_errors=True)


def whole_state(module: ParallelModule) -> dict[str, Any]:
    """`module.full_state_dict()` on the host, on every rank; every rank calls it."""
    whole = module.full_state_dict().items()
    return {name: value.to("cpu") if isinstance(value, torch.Tensor) else value for name, value in whole}

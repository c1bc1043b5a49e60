"""States: whole weights for the files of a framework, and autopar's checkpoints inside its folders.

    checkpoint-500/model.safetensors     whole weights, which from_pretrained reads
    checkpoint-500/autopar/              autopar.save: weights, optimizer, draws, in blocks; loads under another plan
    last.ckpt, last.autopar/             the same beside a framework's checkpoint that is a file
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from autopar.integrations.prepared_module import plain
from autopar.runtime.consensus import from_every_rank
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


def whole_state(module: ParallelModule) -> dict[str, torch.Tensor]:
    """The state dict as plain whole tensors on the host, on every rank; every rank calls it."""
    whole = {
        name: plain(value).detach()
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and name not in module.absent
    }
    if module.plan.in_stages:
        whole = from_every_rank(whole, module.device)
    return {name: value.to("cpu") for name, value in whole.items()}

"""What `.ci/wheel` asks of the installed package: `files CHECKOUT`, `train`, and a model for `autopar plan`."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

import autopar

INSTALLED = Path(autopar.__file__).parent
KINDS = {".py", ".typed", ".json", ".js", ".css", ".j2"}


def files(checkout: Path) -> None:
    """Every module and data file of the checkout is installed, and nothing is imported from the checkout."""
    assert checkout.resolve() not in (INSTALLED.resolve(), *INSTALLED.resolve().parents), f"{INSTALLED} is the checkout"
    wanted, found = _names(checkout), _names(INSTALLED)
    assert wanted == found, f"not in the wheel: {sorted(wanted - found)}; only there: {sorted(found - wanted)}"
    print(f"autopar {metadata.version('autopar')}: {len(found)} files")


def _names(folder: Path) -> set[str]:
    """Of all files of a package, behind links, too."""
    found: set[str] = set()
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            found |= {f"{path.name}/{name}" for name in _names(path)}
        elif path.suffix in KINDS:
            found.add(path.name)
    return found


def train() -> None:
    """The README's example, on the processes of a launcher."""
    readme = metadata.metadata("autopar").get_payload()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(example, names)
    loss = names["loss"]
    assert isinstance(loss, torch.Tensor)
    assert loss.isfinite()
    assert torch.distributed.get_world_size() == 2
    print(f"rank {torch.distributed.get_rank()}: loss {loss:.4f}")


def model() -> tuple[nn.Module, torch.Tensor]:
    """For `autopar plan`."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)), torch.randn(32, 64)


if __name__ == "__main__":
    {"files": lambda: files(Path(sys.argv[2])), "train": train}[sys.argv[1]]()

"""The example of the README, run as it stands; planning needs no process group."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def readme_example() -> str:
    """The one Python block of the README."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def test_example_has_about_fifteen_lines() -> None:
    assert len([line for line in readme_example().splitlines() if line.strip()]) <= 16


@pytest.mark.exhaustive
@pytest.mark.slow
def test_readme_example_trains_and_never_starts_a_process_group() -> None:
    check = (
        "import torch.distributed\n"
        "assert loss.ndim == 0 and loss.isfinite()\n"
        "assert all(p.grad is not None for p in model.parameters())\n"
        "assert [name for name, _ in model.named_parameters()] == ['0.weight', '0.bias', '2.weight', '2.bias']\n"
        "print('trained')\n"
    )
    before_compile, compile_on = readme_example().split("model = autopar.compile", 1)
    planning = "import torch.distributed\nassert not torch.distributed.is_initialized()\n"
    code = before_compile + planning + "model = autopar.compile" + compile_on + check
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "chosen" in done.stdout
    assert "DDP" in done.stdout
    assert done.stdout.rstrip().endswith("trained")

"""Weights & Biases: the steps of a StepLog as an offline run, which `wandb sync` uploads when it is asked to.

    with autopar.StepLog("run.jsonl", module.plan, trackers=[OfflineRun("runs", project="gpt")]) as log: ...
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.integrations.absent_package import absent

try:
    import wandb
except ImportError as error:
    raise absent("wandb", "wandb") from error


class OfflineRun:
    """A tracker of `autopar.StepLog`: a run of its own in `folder`/wandb; nothing is sent."""

    def __init__(self, folder: str | Path, project: str = "autopar") -> None:
        self._folder = Path(folder)
        self._project = project
        self._run: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of a step, by name."""
        if self._run is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(mode="offline", dir=str(self._folder), project=self._project)
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Write what is left, and end the run."""
        if self._run is not None:
            self._run.finish()

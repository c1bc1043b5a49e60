"""TensorBoard: the steps of a StepLog as files that `tensorboard --logdir` shows, measured beside predicted.

    with autopar.StepLog("run.jsonl", module.plan, trackers=[TensorBoard("runs/gpt")]) as log: ...
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autopar.integrations.absent_package import absent

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise absent("tensorboard", "tensorboard") from error


class TensorBoard:
    """A tracker of `autopar.StepLog`: scalars in event files under `folder`, beside those that are there."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._writer: SummaryWriter | None = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of a step, by name."""
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder))
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()

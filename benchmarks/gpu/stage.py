"""A stage: a function that yields rows of figures, with its time limit and its sizes on a GPU and in a rehearsal.

    Stage(name="kernels", what="...", seconds=90, run=kernels.run, full={"sizes": [(8192, 4096)]}, tiny={...})

A row is a dict that JSON can hold; "case" names it. Every row is kept as soon as it is yielded, so a stage that hangs
or crashes loses only what it had not yielded. A row with "error" makes the stage a failed one; "refused" says that
something is not there to be measured, which is no fault.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

Row: TypeAlias = dict[str, Any]
ERROR_LINES = 30
"""Of a traceback, its last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where stages run. device: of this process; carried: the folder that `--prepare` wrote, if there is one."""

    device: torch.device
    rehearse: bool = False
    carried: Path | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """name: of its file; what: one line; seconds: after which it is ended; run: (place, **sizes) -> rows; full, tiny:
    sizes on a GPU and in a rehearsal; num_devices: how many GPUs it needs."""

    name: str
    what: str
    seconds: float
    run: Callable[..., Iterator[Row]]
    full: Mapping[str, Any]
    tiny: Mapping[str, Any]
    num_devices: int = 1

    def rows(self, place: Place) -> Iterator[Row]:
        """Run it at the sizes of the place."""
        return self.run(place, **(self.tiny if place.rehearse else self.full))


def attempted(case: str, call: Callable[[], Mapping[str, Any]]) -> Row:
    """The row of one case: its figures, or the error that it raised, so that the cases behind it are measured too."""
    try:
        return {"case": case, **call()}
    except Exception as error:
        print(traceback.format_exc(), flush=True)
        lines = traceback.format_exc().splitlines()[-ERROR_LINES:]
        return {"case": case, "error": f"{type(error).__name__}: {error}", "lines": lines}

"""Flight record: the last collectives that this rank started, for whoever asks why one does not end.

    flight = RECORD.begin("reduce_scatter", "head/linear#0 (bwd)", (0, 1), 8 << 20)
    str(flight)             reduce_scatter of head/linear#0 (bwd), #42 over ranks 0, 1 (8.0 MiB)
    RECORD.end(flight)      where this rank has its result; of what torch runs on a GPU only torch's own recorder knows
    RECORD.write()          /tmp/autopar-flight-4711-rank0.json, which errors name

Collectives are numbered per group. The ranks of a group start the same ones in one order, so a rank whose number is
behind has not arrived. The file also holds what torch's flight recorder has (states of NCCL's and gloo's calls,
`TORCH_FR_BUFFER_SIZE` of them, 2000 unless told otherwise). `AUTOPAR_FLIGHT_RECORD` names another folder; 0: no files.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from autopar._compat import torch_flight_record
from autopar.errors import ConfigurationError
from autopar.files import write_atomically
from autopar.plans.plan_text import format_bytes

VARIABLE = "AUTOPAR_FLIGHT_RECORD"
CAPACITY = 256
"""Collectives that are kept: a few layers of a step."""
SHOWN = 2
"""Of each rank, in an error."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """A collective. number: among those of its group; began, ended: seconds of `time.monotonic`, None: not ended."""

    kind: str
    operator: str
    ranks: tuple[int, ...]
    nbytes: int
    number: int
    began: float
    ended: float | None = None
    by_torch: bool = False

    def __str__(self) -> str:
        over = ", ".join(map(str, self.ranks))
        return f"{self.kind} of {self.operator}, #{self.number} over ranks {over} ({format_bytes(self.nbytes)})"

    def line(self, now: float) -> str:
        """With what became of it."""
        if self.ended is not None:
            return f"{self}: ended after {self.ended - self.began:.3f} s"
        state = "given to torch" if self.by_torch else "under way"
        return f"{self}: {state} for {now - self.began:.1f} s"


class FlightRecord:
    """See the module docstring. Begun and ended by the thread that computes, read by others."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque(maxlen=CAPACITY)
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._writing = threading.Lock()

    def begin(
        self, kind: str, operator: str, ranks: tuple[int, ...], nbytes: int, *, by_torch: bool = False
    ) -> Flight:
        """Note a collective that starts. nbytes: of what this rank puts in."""
        self._counts[ranks] += 1
        flight = Flight(
            kind=kind,
            operator=operator,
            ranks=ranks,
            nbytes=nbytes,
            number=self._counts[ranks],
            began=time.monotonic(),
            by_torch=by_torch,
        )
        self._flights.append(flight)
        return flight

    @staticmethod
    def end(flight: Flight) -> None:
        """This rank has the result."""
        flight.ended = time.monotonic()

    def last(self, count: int = SHOWN) -> tuple[str, ...]:
        """Lines of the last collectives, the latest one last."""
        now = time.monotonic()
        return tuple(flight.line(now) for flight in list(self._flights)[-count:])

    def write(self) -> Path | None:
        """The file of this rank, written anew; None where none is wanted or it cannot be written."""
        folder = os.environ.get(VARIABLE, "") or tempfile.gettempdir()
        if folder == "0":
            return None
        rank = dist.get_rank() if dist.is_initialized() else 0
        path = Path(folder) / f"autopar-flight-{os.getpid()}-rank{rank}.json"
        content = {"rank": rank, "collectives": self.last(CAPACITY), "torch": torch_flight_record()}
        try:
            with self._writing:
                write_atomically(path, json.dumps(content, indent=1).encode())
        except ConfigurationError:  # the folder is closed, or the disk full: the error that asks is worth more
            return None
        return path

    def told(self, ranks: Sequence[str] = ()) -> str:
        """What an error says of it: where the file is. ranks: lines of other ranks in front of that."""
        path = self.write()
        where = () if path is None else (f"the last collectives of this rank stand in {path}",)
        return "; ".join((*ranks, *where))


RECORD = FlightRecord()
"""Of this process. Beside torch's own process groups, as `progress.HERE` is."""

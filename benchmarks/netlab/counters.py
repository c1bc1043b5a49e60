"""Bytes per link: the file that the switch keeps up to date, read at any time.

    before = read_counters(path, 4);  ...;  read_counters(path, 4) - before      # (4, 4) of each kind

payload: what programs gave to TCP, [source][target]. packets: with headers and acknowledgements, what the link carried.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.netlab.presets import MAX_NODES

KINDS = 3
FILE_BYTES = MAX_NODES * MAX_NODES * KINDS * 8


@dataclass(frozen=True, slots=True, eq=False)
class LinkBytes:
    """(nodes, nodes) bytes from row to column; dropped counts packets."""

    packets: NDArray[np.int64]
    payload: NDArray[np.int64]
    dropped: NDArray[np.int64]

    def __sub__(self, earlier: LinkBytes) -> LinkBytes:
        return LinkBytes(self.packets - earlier.packets, self.payload - earlier.payload, self.dropped - earlier.dropped)


def new_counters(path: Path) -> None:
    """An empty file for the switch."""
    path.write_bytes(bytes(FILE_BYTES))


def read_counters(path: Path, nodes: int) -> LinkBytes:
    """What the links have carried so far."""
    table = np.frombuffer(path.read_bytes(), np.int64).reshape(MAX_NODES, MAX_NODES, KINDS)[:nodes, :nodes]
    return LinkBytes(*(table[..., kind].copy() for kind in range(KINDS)))

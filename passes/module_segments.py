"""Segments: a lowered program cut by module path, so that many equal layers cost what one of them costs.

    embedding.words/mm#0   layers.0.mlp/gelu#0   layers.1/add#0   head/sum#0
    "embedding"            "layers.0"            "layers.1"       "head"

A block is a module whose path ends in a number; everything else belongs to the outermost module of its path. A model of
L equal layers is embedding + L x one block + head, and a pipeline stage is a run of such pieces (`placed`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopar.errors import ConfigurationError

_BLOCK = re.compile(r"^(.*?\.\d+)(?=[./])")


def block_path(name: str) -> str | None:
    """The block to which an operator or a parameter belongs, None outside of blocks: "layers.3/add#0" -> "layers.3"."""
    match = _BLOCK.match(name)
    return match[1] if match else None


def segment_of(name: str) -> str:
    """The segment of an operator or parameter: its block, else the outermost module ("head.norm/mul#0" -> "head")."""
    return block_path(f"{name}/") or name.split("/")[0].split(".")[0]


def placed(blocks: Sequence[str], chunks: int, *, first: str, last: str) -> tuple[tuple[str, ...], ...]:
    """The segments of every model chunk: blocks in equal runs, `first` in front of all, `last` behind all.

    placed(["b"] * 4, 2, first="e", last="h") is (("e", "b", "b"), ("b", "b", "h")). What does not divide gives the
    first chunks one block more. Raises ConfigurationError for more chunks than blocks.
    """
    if not 1 <= chunks <= max(len(blocks), 1):
        raise ConfigurationError(f"{len(blocks)} layers do not fill {chunks} pipeline chunks")
    size, more = divmod(len(blocks), chunks)
    runs, start = [], 0
    for chunk in range(chunks):
        end = start + size + (chunk < more)
        runs.append(tuple(blocks[start:end]))
        start = end
    runs[0] = (first, *runs[0])
    runs[-1] = (*runs[-1], last)
    return tuple(runs)

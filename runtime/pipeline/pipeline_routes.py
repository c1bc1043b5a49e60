"""Routes: which rank of one rank group sends which piece of a value to which rank of another.

    columns over two ranks -> whole on one       rank 0 sends its columns 0..3, rank 1 its 0..3; they become 0..3, 4..7
    whole on one -> rows over two                rank 2 sends rows 0..3 to rank 0 and rows 4..7 to rank 1

Every rank of the target takes each index once, from a rank that holds it; where several do, from the one at its own
place if that is one of them. So equal layouts on equal meshes go straight across, partial sums too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.layouts.placement import Layout, Mesh, local_runs

Indices = tuple[torch.Tensor | None, ...]
"""Per dim, local indices; None: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """How a value lies on the ranks of a rank group."""

    layout: Layout
    mesh: Mesh
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentPiece:
    """What rank `source` sends to rank `target`: `taken` of its block, of local shape `shape`, becomes `put` of the
    other's."""

    source: int
    target: int
    shape: tuple[int, ...]
    taken: Indices
    put: Indices

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The piece, from the block of the source."""
        for dim, indices in enumerate(self.taken):
            if indices is not None:
                block = block.index_select(dim, indices.to(block.device))
        return block.contiguous()

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the target's block."""
        return all(indices is None for indices in self.put)

    def into(self, block: torch.Tensor, piece: torch.Tensor) -> None:
        """Write the piece into the block of the target."""
        places = [
            torch.arange(size, device=block.device) if indices is None else indices.to(block.device)
            for size, indices in zip(block.shape, self.put, strict=True)
        ]
        block.index_put_(torch.meshgrid(*places, indexing="ij"), piece)

    def on(self, device: torch.device) -> SentPiece:
        """The same with its indices on a device: a step that copied them there would let the host wait each time."""
        taken, put = (
            tuple(None if indices is None else indices.to(device) for indices in dims)
            for dims in (self.taken, self.put)
        )
        return replace(self, taken=taken, put=put)


def route(shape: Sequence[int], source: GroupLayout, target: GroupLayout) -> tuple[SentPiece, ...]:
    """The pieces of a value of global `shape` that go from one rank group to another."""
    blocks: dict[tuple[tuple[tuple[int, int], ...], ...], list[int]] = {}
    for place in range(len(source.ranks)):
        blocks.setdefault(_block(shape, source, place), []).append(place)
    pieces = []
    for place, rank in enumerate(target.ranks):
        wanted = [_indices(runs) for runs in _block(shape, target, place)]
        for block, places in blocks.items():
            sender = source.ranks[place if place in places else places[place % len(places)]]
            piece = _overlap(sender, rank, [_indices(runs) for runs in block], wanted)
            if piece is not None:
                pieces.append(piece)
    return tuple(pieces)


def _block(shape: Sequence[int], ends: GroupLayout, place: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per dim, the runs of global indices that a rank holds."""
    coordinate = ends.mesh.coordinate(place)
    return tuple(local_runs(size, ends.layout, dim, ends.mesh, coordinate) for dim, size in enumerate(shape))


def _indices(runs: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(start, start + length) for start, length in runs] or [np.arange(0)])


def _overlap(
    source: int, target: int, held: list[NDArray[np.int64]], wanted: list[NDArray[np.int64]]
) -> SentPiece | None:
    """What both hold; None where that is nothing."""
    taken = [np.flatnonzero(np.isin(have, want)) for have, want in zip(held, wanted, strict=True)]
    put = [np.flatnonzero(np.isin(want, have)) for have, want in zip(held, wanted, strict=True)]
    if any(not len(indices) for indices in taken):
        return None
    return SentPiece(
        source=source,
        target=target,
        shape=tuple(len(indices) for indices in taken),
        taken=tuple(None if len(t) == len(have) else torch.from_numpy(t) for t, have in zip(taken, held, strict=True)),
        put=tuple(None if len(p) == len(want) else torch.from_numpy(p) for p, want in zip(put, wanted, strict=True)),
    )

"""Moved blocks: the rounds of a rank (`layouts/block_moves.py`), run: blocks go from the memory where they lie to where
they are to lie, in messages between pairs of ranks.

    sent = move_blocks(tensors, mine, rank_moves(tensors, moves, rank(), most_bytes), device)

Of a round all messages to and from a peer are one, in bytes of any dtype. What a rank keeps of a tensor is copied on
the way to its new memory; a block that stays where it is, is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.layouts.block_moves import Move, MovingTensor, RankMoves, Round
from autopar.layouts.index_blocks import Block, ascending, block_shape, boxes, common
from autopar.runtime.consensus import exchanging
from autopar.runtime.process_groups import rank


@dataclass(slots=True, kw_only=True)
class HeldBlock:
    """A tensor on this rank. before: its block, None where it has none; empty: new memory of a shape; take: what
    becomes of the block that it is to have, None where it is to have none. Then `before` is let go."""

    dtype: torch.dtype
    before: torch.Tensor | None
    empty: Callable[[Sequence[int]], torch.Tensor]
    take: Callable[[torch.Tensor | None], None]
    behind: torch.Tensor | None = None


def move_blocks(
    tensors: Mapping[str, MovingTensor], mine: Mapping[str, HeldBlock], part: RankMoves, device: torch.device
) -> int:
    """Run the rounds of this rank; all ranks that have some call it alike. mine: what this rank has, or is to have;
    device: of messages. Returns the bytes that were sent. Raises RankLostError where another rank ends."""
    carrier = _Carrier(tensors, mine, device)
    with torch.no_grad():
        for each in part.rounds:
            carrier.run(each)
    return carrier.sent_bytes


class _Carrier:
    def __init__(
        self, tensors: Mapping[str, MovingTensor], mine: Mapping[str, HeldBlock], device: torch.device
    ) -> None:
        self._tensors, self._mine, self._device, self._rank = tensors, mine, device, rank()
        self.sent_bytes = 0

    def run(self, each: Round) -> None:
        for name in each.alone:
            self._open(name)
            self._close(name)
        for name in each.opened:
            self._open(name)
        self._exchange(each)
        for name in each.closed:
            self._close(name)

    def _open(self, name: str) -> None:
        """Take new memory, and copy what the rank has of it."""
        tensor, mine = self._tensors[name], self._mine[name]
        wanted, held = tensor.wanted.get(self._rank), tensor.held.get(self._rank)
        if tensor.stays(self._rank):
            mine.behind = mine.before
        elif wanted is not None:
            mine.behind = mine.empty(block_shape(wanted))
            kept = None if held is None else common(ascending(held), ascending(wanted))
            if kept is not None and held is not None and mine.before is not None:
                copy_part(mine.before, held, mine.behind, wanted, kept)

    def _close(self, name: str) -> None:
        mine = self._mine[name]
        behind, mine.before, mine.behind = mine.behind, None, None
        mine.take(behind)

    def _exchange(self, each: Round) -> None:
        incoming = {peer: self._message(moves) for peer, moves in sorted(each.receives.items())}
        outgoing = {peer: self._packed(moves) for peer, moves in sorted(each.sends.items())}
        self.sent_bytes += sum(message.numel() for message in outgoing.values())
        # receives first: gloo tells a sender over the same connection that its peer is ready
        posted = [dist.P2POp(dist.irecv, message, peer) for peer, message in incoming.items()]
        posted += [dist.P2POp(dist.isend, message, peer) for peer, message in outgoing.items()]
        if posted:
            with exchanging("blocks that move between plans"):
                for work in dist.batch_isend_irecv(posted):
                    work.wait()
        for peer, message in incoming.items():
            self._unpack(message, each.receives[peer])

    def _message(self, moves: Sequence[Move]) -> torch.Tensor:
        return torch.empty(sum(move.nbytes for move in moves), dtype=torch.uint8, device=self._device)

    def _packed(self, moves: Sequence[Move]) -> torch.Tensor:
        message = self._message(moves)
        for move, values in self._parts(message, moves):
            mine, held = self._mine[move.name], self._tensors[move.name].held[self._rank]
            assert mine.before is not None
            copy_part(mine.before, held, values, move.block, move.block)
        return message

    def _unpack(self, message: torch.Tensor, moves: Sequence[Move]) -> None:
        for move, values in self._parts(message, moves):
            mine, wanted = self._mine[move.name], self._tensors[move.name].wanted[self._rank]
            assert mine.behind is not None
            copy_part(values, move.block, mine.behind, wanted, move.block)

    def _parts(self, message: torch.Tensor, moves: Sequence[Move]) -> list[tuple[Move, torch.Tensor]]:
        """The moves with their views of a message, those of wide dtypes first, so that every view is aligned."""
        found, begin = [], 0
        for move in sorted(moves, key=lambda move: -self._tensors[move.name].itemsize):
            part = message[begin : begin + move.nbytes].view(self._mine[move.name].dtype)
            found.append((move, part.view(block_shape(move.block))))
            begin += move.nbytes
        return found


def copy_part(source: torch.Tensor, held: Block, target: torch.Tensor, wanted: Block, part: Block) -> None:
    """Copy a part of the block `held`, which lies in `source`, to where it belongs in `target`, the block `wanted`."""
    for box in boxes(held, wanted, part):
        here, there = source, target
        for dim, segment in enumerate(box):
            here = here.narrow(dim, segment.here, segment.length)
            there = there.narrow(dim, segment.there, segment.length)
        there.copy_(here)

"""Block moves: what ranks send each other so that tensors that lie one way lie another way, and in which order.

    w = MovingTensor(itemsize=4, held={0: rows(0, 4), 1: rows(4, 4)}, wanted={0: columns(0, 3), 1: columns(3, 3)})
    moves = moves_between({"w": w}, most_bytes=1 << 20)
        [Move("w", source=1, target=0, block=rows 4-7 of columns 0-2), Move("w", source=0, target=1, block=...)]
    rank_moves({"w": w}, moves, rank=0, most_bytes=8 << 20)       its rounds of sends and receives

What a rank holds already is sent by nobody, and everything else once, so no schedule sends less. Of several holders the
one sends that lies on the same node, and of these the one that has sent least. The result depends on the arguments
alone, so every rank finds the same one for itself, and nobody asks for anything.

Tensors go one behind the other. A round of a rank sends at most `most_bytes`, and receives as much; a tensor has its
new memory from the first round that brings a part of it, and its old memory up to the last that sends one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from autopar.errors import ConfigurationError
from autopar.layouts.index_blocks import Block, ascending, common, cut_block, elements, without

PIECES = 4
"""Into how many pieces at least what a round may send is cut: so several holders share what one rank asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingTensor:
    """Which rank holds which block of a tensor, and which it is to hold, each in the order in which it lies there. A
    rank may be among the one, the other, or both. itemsize: bytes of an element."""

    itemsize: int
    held: Mapping[int, Block]
    wanted: Mapping[int, Block]

    def held_bytes(self, rank: int) -> int:
        """What a rank holds before."""
        return elements(self.held[rank]) * self.itemsize if rank in self.held else 0

    def wanted_bytes(self, rank: int) -> int:
        """What a rank holds behind."""
        return elements(self.wanted[rank]) * self.itemsize if rank in self.wanted else 0

    def stays(self, rank: int) -> bool:
        """Whether a rank keeps the memory that it has: what it is to hold lies there, as it is to lie."""
        return rank in self.held and self.held[rank] == self.wanted.get(rank)


@dataclass(frozen=True, slots=True)
class Move:
    """A block of the tensor `name`, whose runs ascend, from a rank to another."""

    name: str
    source: int
    target: int
    block: Block
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a rank lacks, and who holds all of it."""

    target: int
    holders: tuple[int, ...]
    block: Block


def moves_between(
    tensors: Mapping[str, MovingTensor], most_bytes: int, ranks_per_node: int | None = None
) -> list[Move]:
    """What is sent, in the order of the tensors, in moves of at most `most_bytes`. ranks_per_node: None: all on one.

    Raises ConfigurationError naming a tensor of which a rank is to hold what no rank holds.
    """
    known: dict[object, list[_Piece]] = {}
    sent: dict[int, int] = defaultdict(int)
    moves = []
    for name, tensor in tensors.items():
        lies = (tuple(tensor.held.items()), tuple(tensor.wanted.items()))
        if lies not in known:
            known[lies] = list(_lacking(name, tensor, ranks_per_node))
        for piece in known[lies]:
            for block in cut_block(piece.block, most_bytes // tensor.itemsize):
                source = _source(piece, sent, ranks_per_node)
                move = Move(name, source, piece.target, block, elements(block) * tensor.itemsize)
                sent[source] += move.nbytes
                moves.append(move)
    return moves


def _lacking(name: str, tensor: MovingTensor, ranks_per_node: int | None) -> Iterable[_Piece]:
    """What each rank does not hold of what it is to hold, by who has it."""
    holders: dict[Block, list[int]] = {}
    for rank, block in sorted(tensor.held.items()):
        holders.setdefault(ascending(block), []).append(rank)
    for target, wanted in sorted(tensor.wanted.items()):
        lacks = _beyond(wanted, tensor.held.get(target))
        near = sorted(holders.items(), key=lambda each: not _near(target, each[1], ranks_per_node))
        for block, ranks in near:
            for part in lacks:
                inside = common(part, block)
                if inside is not None:
                    yield _Piece(target, tuple(ranks), inside)
            lacks = [rest for part in lacks for rest in without(part, block)]
        if lacks:
            raise ConfigurationError(
                f"{name}: rank {target} is to hold {sum(map(elements, lacks)):,} elements that no rank has: all ranks "
                "that hold a part of the state must pass it"
            )


def _beyond(wanted: Block, own: Block | None) -> list[Block]:
    """What a rank is to hold and does not."""
    if own is not None:
        return without(ascending(wanted), ascending(own))
    return [ascending(wanted)] if elements(wanted) else []


def _near(target: int, ranks: Sequence[int], ranks_per_node: int | None) -> bool:
    return ranks_per_node is None or any(rank // ranks_per_node == target // ranks_per_node for rank in ranks)


def _source(piece: _Piece, sent: Mapping[int, int], ranks_per_node: int | None) -> int:
    """Who sends: on the node of the target where there is one, then who has sent least, then who comes next to it."""

    def cost(rank: int) -> tuple[bool, int, int]:
        tie_break = abs(rank - piece.target)
        return not _near(piece.target, [rank], ranks_per_node), sent.get(rank, 0), tie_break

    return min(piece.holders, key=cost)


def least_bytes(tensors: Mapping[str, MovingTensor]) -> int:
    """The fewest bytes that can be sent: what every rank is to hold and does not, once."""
    return sum(
        sum(map(elements, _beyond(wanted, tensor.held.get(rank)))) * tensor.itemsize
        for tensor in tensors.values()
        for rank, wanted in tensor.wanted.items()
    )


Numbered: TypeAlias = tuple[int, Move]


def in_rounds(moves: Iterable[Move], most_bytes: int) -> list[Numbered]:
    """Every move with the number of its round: in one round no rank sends more than `most_bytes`, nor receives more,
    but for a single move. Rounds of a rank follow the order of the moves."""
    places: dict[tuple[str, int], tuple[int, int]] = {}  # (round, bytes in it) of every sender and receiver
    found = []
    for move in moves:
        ends = ("send", move.source), ("receive", move.target)
        number = max(places.get(end, (0, 0))[0] for end in ends)
        loads = [load if at == number else 0 for at, load in (places.get(end, (0, 0)) for end in ends)]
        if any(load and load + move.nbytes > most_bytes for load in loads):
            number, loads = number + 1, [0, 0]
        for end, load in zip(ends, loads, strict=True):
            places[end] = (number, load + move.nbytes)
        found.append((number, move))
    return found


@dataclass(slots=True)
class Round:
    """What one rank does at a time. alone: tensors of which it needs nothing and sends nothing; opened: those whose new
    memory is taken now; closed: those that are done behind the sends and receives, which are by peer."""

    alone: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    sends: dict[int, list[Move]] = field(default_factory=dict)
    receives: dict[int, list[Move]] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)

    @property
    def staged_bytes(self) -> int:
        """Of all messages."""
        return sum(move.nbytes for peers in (self.sends, self.receives) for held in peers.values() for move in held)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMoves:
    """What one rank does. peak_bytes: at most so much more than before is held at a time, of tensors and of messages on
    their way; staged_bytes: the most that messages of a round take."""

    rounds: tuple[Round, ...]
    sent_bytes: int
    received_bytes: int
    peak_bytes: int
    staged_bytes: int


def rank_moves(tensors: Mapping[str, MovingTensor], moves: Sequence[Move], rank: int, most_bytes: int) -> RankMoves:
    """The part of a rank. moves: those of all ranks; most_bytes: of a round, as of `in_rounds`."""
    rounds: dict[int, Round] = defaultdict(Round)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, move in in_rounds(moves, most_bytes):
        if rank in (move.source, move.target):
            first[move.name] = min(number, first.get(move.name, number))
            last[move.name] = max(number, last.get(move.name, number))
            peers = rounds[number].sends if rank == move.source else rounds[number].receives
            peers.setdefault(move.target if rank == move.source else move.source, []).append(move)
    done = 0
    for name, tensor in tensors.items():
        if name in first:
            done = max(done, last[name])
            rounds[first[name]].opened.append(name)
            rounds[last[name]].closed.append(name)
        elif rank in tensor.held or rank in tensor.wanted:
            rounds[done].alone.append(name)
    in_order = tuple(rounds[number] for number in sorted(rounds))
    mine = [move for move in moves if rank in (move.source, move.target)]
    return RankMoves(
        rounds=in_order,
        sent_bytes=sum(move.nbytes for move in mine if move.source == rank),
        received_bytes=sum(move.nbytes for move in mine if move.target == rank),
        peak_bytes=_peak(in_order, tensors, rank),
        staged_bytes=max((each.staged_bytes for each in in_order), default=0),
    )


def _peak(rounds: Iterable[Round], tensors: Mapping[str, MovingTensor], rank: int) -> int:
    held, peak = 0, 0

    def taken(name: str) -> int:
        return 0 if tensors[name].stays(rank) else tensors[name].wanted_bytes(rank)

    def freed(name: str) -> int:
        return 0 if tensors[name].stays(rank) else tensors[name].held_bytes(rank)

    for each in rounds:
        for name in each.alone:
            peak = max(peak, held + taken(name))
            held += taken(name) - freed(name)
        held += sum(map(taken, each.opened))
        peak = max(peak, held + each.staged_bytes)
        held -= sum(map(freed, each.closed))
    return peak

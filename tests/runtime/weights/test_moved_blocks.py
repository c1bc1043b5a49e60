"""Blocks that move, by the code that ranks run, with threads in place of processes and queues in place of a network."""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.layouts.block_moves import MovingTensor, RankMoves, moves_between, rank_moves
from autopar.layouts.index_blocks import Block
from autopar.runtime.weights import moved_blocks
from autopar.runtime.weights.moved_blocks import HeldBlock, move_blocks
from tests.layouts.test_block_moves import PLANS, SHAPES, blocks
from tests.layouts.test_index_blocks import indices

DTYPES = {"matrix": torch.float32, "fused": torch.bfloat16, "vector": torch.float64, "number": torch.int64,
          "odd": torch.bool}  # fmt: skip
WHOLE = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name))).mul(100).to(DTYPES[name])
    for name, shape in SHAPES.items()
}
STAGED = 512


def block_values(name: str, block: Block) -> torch.Tensor:
    values = WHOLE[name]
    for dim, runs in enumerate(block):
        values = values.index_select(dim, torch.tensor(indices(runs), dtype=torch.int64))
    return values.clone()


class Ranks:
    """Threads that stand for ranks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._here = threading.local()
        self._sent: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        patch.setattr(moved_blocks, "rank", lambda: self._here.rank)
        names = {"irecv": "receive", "isend": "send", "P2POp": lambda *op: op, "batch_isend_irecv": self._exchange}
        patch.setattr(moved_blocks, "dist", SimpleNamespace(**names))

    def _exchange(self, posted: list[tuple[str, torch.Tensor, int]]) -> list[Any]:
        me = self._here.rank
        for way, message, peer in posted:
            if way == "send":
                self._sent[me, peer].put(message.clone())
        for way, message, peer in posted:
            if way == "receive":
                message.copy_(self._sent[peer, me].get(timeout=2))
        return []

    def run(self, job: Callable[[int], None], count: int) -> None:
        failures: list[BaseException] = []

        def guarded(rank: int) -> None:
            self._here.rank = rank
            try:
                job(rank)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class Held:
    """The blocks of one rank, and how many bytes more than in the beginning are held, at most."""

    def __init__(self, moving: dict[str, MovingTensor], rank: int) -> None:
        self.more, self.peak = 0, 0
        self.found: dict[str, torch.Tensor | None] = {}
        self.blocks = {
            name: HeldBlock(
                dtype=WHOLE[name].dtype,
                before=self._watched(block_values(name, tensor.held[rank])) if rank in tensor.held else None,
                empty=lambda shape, dtype=WHOLE[name].dtype: self._made(torch.empty(shape, dtype=dtype)),
                take=lambda block, name=name: self.found.__setitem__(name, block),
            )
            for name, tensor in moving.items()
            if rank in tensor.held or rank in tensor.wanted
        }

    def _watched(self, block: torch.Tensor) -> torch.Tensor:
        weakref.finalize(block, self._freed, block.numel() * block.itemsize)
        return block

    def _made(self, block: torch.Tensor) -> torch.Tensor:
        self.more += block.numel() * block.itemsize
        self.peak = max(self.peak, self.more)
        return self._watched(block)

    def _freed(self, nbytes: int) -> None:
        self.more -= nbytes


def moved(before: str, after: str, patch: pytest.MonkeyPatch) -> tuple[list[Held], list[RankMoves], list[int]]:
    moving = {
        name: MovingTensor(
            itemsize=DTYPES[name].itemsize, held=blocks(PLANS[before], name), wanted=blocks(PLANS[after], name)
        )
        for name in SHAPES
    }
    moves = moves_between(moving, STAGED // 8)
    ranks = [Held(moving, rank) for rank in range(8)]
    parts = [rank_moves(moving, moves, rank, STAGED // 2) for rank in range(8)]
    sent = [0] * 8

    def job(rank: int) -> None:
        sent[rank] = move_blocks(moving, ranks[rank].blocks, parts[rank], torch.device("cpu"))

    Ranks(patch).run(job, 8)
    return ranks, parts, sent


def differing(ranks: list[Held], after: str) -> list[tuple[str, int]]:
    return [
        (name, rank)
        for name in SHAPES
        for rank, block in blocks(PLANS[after], name).items()
        if not torch.equal(ranks[rank].found[name], block_values(name, block))
    ]


@pytest.mark.exhaustive(every=7)
@pytest.mark.parametrize(("before", "after"), itertools.product(PLANS, PLANS))
def test_all_ranks_hold_what_the_other_layout_says(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, parts, sent = moved(before, after, monkeypatch)
    assert differing(ranks, after) == []
    for rank, (held, part) in enumerate(zip(ranks, parts, strict=True)):
        wanted = {name for name in SHAPES if rank in blocks(PLANS[after], name)}
        assert {name for name, block in held.found.items() if block is not None} == wanted
        assert sent[rank] == part.sent_bytes
        assert part.staged_bytes <= STAGED
        assert held.peak <= part.peak_bytes


def test_blocks_that_are_put_elsewhere_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    as_it_is = moved_blocks.boxes

    def reversed_runs(here: Block, there: Block, part: Block) -> Any:
        for box in as_it_is(here, there, part):
            yield tuple(type(each)(each.here, 0, each.length) for each in box)

    monkeypatch.setattr(moved_blocks, "boxes", reversed_runs)
    ranks, _, _ = moved("zero x tp 4", "zero 3", monkeypatch)
    assert differing(ranks, "zero 3")

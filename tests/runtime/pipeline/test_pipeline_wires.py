"""Both ends of a wire know the order of its messages, and no order can lock a transport that keeps it."""

from __future__ import annotations

import random

import pytest

from autopar.runtime.pipeline.pipeline_wires import Message, Sends, message_order
from autopar.schedules.actions import PipeAction, Schedule
from autopar.schedules.list_scheduler import build_schedule

FAMILIES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]


def _chain_with_a_skip(num_stages: int) -> Sends:
    sends = {(stage, False): [("x", stage + 1)] for stage in range(num_stages - 1)}
    sends |= {(stage, True): [("dx", stage - 1)] for stage in range(1, num_stages)}
    sends[0, False] = [("x", 1), ("skip", num_stages - 1)]
    sends[num_stages - 1, True] = [("dx", num_stages - 2), ("dskip", 0)]
    return sends


def _finishes(schedule: Schedule, sends: Sends, order: list[Message]) -> bool:
    """Play it where a pair of ranks does one message at a time, in this order, and a receive waits for its send."""
    holder = schedule.rank_of_stage
    waiting = {pair: [m for m in order if {m.source, m.target} == pair] for pair in map(frozenset, _pairs(order))}
    made: set[tuple[str, int, int]] = set()
    position = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for messages in waiting.values():
            while messages and (messages[0].name, messages[0].micro_batch, messages[0].reader) in made:
                messages.pop(0)
                moved = True
        for rank, actions in enumerate(schedule.ranks):
            if position[rank] < len(actions) and _can_run(actions[position[rank]], sends, holder, made, waiting):
                action = actions[position[rank]]
                if action.kind != "W":
                    made |= {(n, action.micro_batch, r) for n, r in sends.get((action.stage, action.kind != "F"), ())}
                position[rank] += 1
                moved = True
    return all(at == len(actions) for at, actions in zip(position, schedule.ranks, strict=True))


def _pairs(order: list[Message]) -> set[frozenset[int]]:
    return {frozenset((m.source, m.target)) for m in order}


def _can_run(
    action: PipeAction,
    sends: Sends,
    holder: tuple[int, ...],
    made: set[tuple[str, int, int]],
    waiting: dict[frozenset[int], list[Message]],
) -> bool:
    if action.kind == "W":
        return True
    for (source, backward), values in sends.items():
        for name, reader in values:
            if reader == action.stage and backward == (action.kind != "F"):
                pair = frozenset((holder[source], holder[reader]))
                on_its_way = any(m[:3] == (name, action.micro_batch, reader) for m in waiting.get(pair, ()))
                if on_its_way or (name, action.micro_batch, reader) not in made:
                    return False
    return True


@pytest.mark.parametrize(("family", "chunks"), FAMILIES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_family_can_lock(family: str, chunks: int, num_ranks: int) -> None:
    schedule = build_schedule(family, num_ranks, 8, chunks)
    sends = _chain_with_a_skip(schedule.num_stages)
    assert _finishes(schedule, sends, message_order(schedule, sends))


def test_a_rank_sends_in_the_order_of_its_actions() -> None:
    schedule = build_schedule("interleaved", 2, 4, 2)
    order = message_order(schedule, _chain_with_a_skip(4))
    for rank, actions in enumerate(schedule.ranks):
        made = [_made_by(message) for message in order if message.source == rank]
        places = [actions.index(action) for action in made]
        assert places == sorted(places)


def _made_by(message: Message) -> PipeAction:
    stage = {"x": message.reader - 1, "dx": message.reader + 1, "skip": 0, "dskip": 3}[message.name]
    return PipeAction(stage, "B" if message.name.startswith("d") else "F", message.micro_batch)


def test_messages_in_another_order_lock() -> None:
    schedule = build_schedule("1f1b", 4, 8, 1)
    sends = _chain_with_a_skip(4)
    order = message_order(schedule, sends)
    random.Random(0).shuffle(order)
    assert not _finishes(schedule, sends, order)

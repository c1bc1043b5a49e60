"""A pipeline schedule as data: for each rank, the ordered list of what it computes.

A model is cut into stages 0, 1, ...; a rank holds one stage or several (its chunks). Each micro-batch passes every
stage forward (F) and, in reverse, backward: B makes all gradients, or I those of the inputs and W, later, those of the
weights. `2F0` is stage 2, forward, micro-batch 0, as in torch.distributed.pipelining. 1F1B of two stages and three
micro-batches, one line per rank:

    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

from autopar.errors import ConfigurationError

Kind: TypeAlias = Literal["F", "B", "I", "W"]
"""Forward; whole backward; gradients of the inputs only; gradients of the weights only."""

_ACTION = re.compile(r"\s*(\d+)([FBIW])(\d+)\s*")


class PipeAction(NamedTuple):
    """One stage's pass over one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank computes, in its order; stages are placed where their actions stand."""

    ranks: tuple[tuple[PipeAction, ...], ...]

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, actions)) for actions in self.ranks)

    def __iter__(self) -> Iterator[PipeAction]:
        return (action for actions in self.ranks for action in actions)

    @property
    def num_stages(self) -> int:
        """Stages of the model, counted over all ranks."""
        return 1 + max(action.stage for action in self)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return 1 + max(action.micro_batch for action in self)

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that holds each stage. Raises ConfigurationError where two ranks hold one."""
        holder: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for stage in {action.stage for action in actions}:
                if holder.setdefault(stage, rank) != rank:
                    raise ConfigurationError(f"stage {stage} stands on ranks {holder[stage]} and {rank}")
        missing = sorted(set(range(self.num_stages)) - set(holder))
        if missing:
            raise ConfigurationError(f"no rank holds stage {missing[0]}")
        return tuple(holder[stage] for stage in range(self.num_stages))


def parse_action(text: str) -> PipeAction:
    """Read `2F0`. Raises ConfigurationError for anything else."""
    matched = _ACTION.fullmatch(text)
    if matched is None:
        raise ConfigurationError(f"{text!r} is no pipeline action; write stage, kind and micro-batch, as 2F0")
    return PipeAction(int(matched[1]), cast(Kind, matched[2]), int(matched[3]))


def parse_schedule(text: str) -> Schedule:
    """Read one line of actions per rank, as `str(schedule)` writes them; empty lines do not count."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigurationError("a schedule needs at least one rank")
    return Schedule(tuple(tuple(parse_action(word) for word in line.split(",") if word.strip()) for line in lines))


def producer(action: PipeAction, num_stages: int) -> tuple[int, Literal["F", "gradient"]] | None:
    """(stage, pass) of the same micro-batch on another stage whose output the action needs; None: its own only.

    F needs the forward of the stage before, B and I need the input gradient of the stage behind.
    """
    if action.kind == "F":
        return None if action.stage == 0 else (action.stage - 1, "F")
    if action.kind == "W" or action.stage == num_stages - 1:
        return None
    return action.stage + 1, "gradient"


def receiver(action: PipeAction, num_stages: int) -> int | None:
    """The stage that needs the action's output; None: no other one."""
    target = {"F": action.stage + 1, "W": -1}.get(action.kind, action.stage - 1)
    return target if 0 <= target < num_stages else None

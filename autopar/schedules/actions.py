"""A pipeline schedule as data: for each rank, the ordered list of what it computes.

A model is cut into stages 0, 1, ...; a rank holds one stage or several (its chunks). Each micro-batch passes every
stage forward (F) and, in reverse, backward: B makes all gradients, or I those of the inputs and W, later, those of the
weights. `2F0` is stage 2, forward, micro-batch 0, as in torch.distributed.pipelining. 1F1B of two stages and three
micro-batches, one line per rank:

    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2

Two more things can be said. Where a stage stands on two ranks (pipelines in both directions), each micro-batch takes it
on one of them: `rank_of(stage, micro_batch)`. And micro-batch -1 is the last one of the step before, whose forward that
step ran and whose backward it left to this one (PipeDream-2BW): `0B-1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, cast

from autopar.errors import ConfigurationError

Kind: TypeAlias = Literal["F", "B", "I", "W"]
"""Forward; whole backward; gradients of the inputs only; gradients of the weights only."""

_ACTION = re.compile(r"\s*(\d+)([FBIW])(-?\d+)\s*")


class PipeAction(NamedTuple):
    """One stage's pass over one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """What every rank computes, in its order; stages are placed where their actions stand."""

    ranks: tuple[tuple[PipeAction, ...], ...]

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, actions)) for actions in self.ranks)

    def __iter__(self) -> Iterator[PipeAction]:
        return (action for actions in self.ranks for action in actions)

    @cached_property
    def num_stages(self) -> int:
        """Stages of the model, counted over all ranks."""
        return 1 + max(action.stage for action in self)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return 1 + max(action.micro_batch for action in self)

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that takes a micro-batch through a stage."""
        return self._ranks_of[stage, micro_batch % self.micro_batches]

    def route(self, micro_batch: int) -> tuple[int, ...]:
        """The ranks that a micro-batch passes, in the order of the stages."""
        return tuple(self.rank_of(stage, micro_batch) for stage in range(self.num_stages))

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage: one, or two that take different micro-batches through it.

        Raises ConfigurationError where no rank has a stage, or two ranks take one micro-batch through it.
        """
        found: list[set[int]] = [set() for _ in range(self.num_stages)]
        for (stage, _), rank in self._ranks_of.items():
            found[stage].add(rank)
        missing = [stage for stage, ranks in enumerate(found) if not ranks]
        if missing:
            raise ConfigurationError(f"no rank holds stage {missing[0]}")
        return tuple(tuple(sorted(ranks)) for ranks in found)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that holds each stage. Raises ConfigurationError where two ranks hold one."""
        for stage, ranks in enumerate(self.holders):
            if len(ranks) > 1:
                raise ConfigurationError(
                    f"stage {stage} stands on ranks {' and '.join(map(str, ranks))}, for different micro-batches"
                )
        return tuple(ranks[0] for ranks in self.holders)

    def kinds(self, stage: int) -> frozenset[Kind]:
        """The passes that a stage takes a micro-batch through."""
        return frozenset(action.kind for action in self if action.stage == stage)

    def last_kind(self, stage: int, rank: int) -> Kind | None:
        """The last pass of the backward of a stage on a rank; None where it has none, or leaves some to the next
        step."""
        kinds = [action.kind for action in self.ranks[rank] if action.stage == stage and action.kind != "F"]
        return kinds[-1] if kinds and self.drains else None

    @cached_property
    def forward_only(self) -> Schedule:
        """The same without backward."""
        return Schedule(tuple(tuple(action for action in actions if action.kind == "F") for actions in self.ranks))

    def awaited(self, action: PipeAction) -> tuple[int, Literal["F", "gradient"]] | None:
        """The `producer` of an action, None where it ran in the step before."""
        needed = producer(action, self.num_stages)
        if needed is None or action.micro_batch >= 0 or (needed[0], action.micro_batch) in self.left_over:
            return needed
        return None

    @cached_property
    def _ranks_of(self) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for rank, actions in enumerate(self.ranks):
            for stage, _, micro_batch in actions:
                other = found.setdefault((stage, micro_batch % self.micro_batches), rank)
                if other != rank:
                    raise ConfigurationError(
                        f"stage {stage} stands on ranks {other} and {rank}, both take {micro_batch}"
                    )
        return found

    @property
    def drains(self) -> bool:
        """Whether a step leaves nothing to the next one."""
        return not self.left_over

    @cached_property
    def left_over(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch below 0) of the backwards that the step before left to this one."""
        return frozenset((action.stage, action.micro_batch) for action in self if action.micro_batch < 0)


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

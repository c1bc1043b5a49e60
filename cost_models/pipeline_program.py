"""A pipeline step as one program of all ranks, for the simulator: traces, overlap inside of passes, slowdown.

Every pass of a schedule becomes the actions of its stage's program, which stand on the streams of the stage's rank, so
that collectives of one pass run beside the computation of the next. What a pass hands on travels on a stream of its
rank: one inside of the node, one to other nodes. A step of equal stages without communication inside of passes:

    programs = stage_programs(stages)                        # {(0, "F"): PassProgram(...), ...}
    simulate(pipeline_program(schedule, programs, send_seconds=1e-3)).write_chrome_trace("step.json")
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopar.cost_models.schedule_player import pass_bytes, pass_seconds, send_list
from autopar.cost_models.simulator import COMPUTE_STREAM, Action
from autopar.cost_models.stage_costs import StageCosts
from autopar.errors import ConfigurationError
from autopar.schedules.actions import Kind, PipeAction, Schedule, receiver
from autopar.schedules.check import runnable_order

SENDS = TO_ITS_NODE, TO_OTHER_NODES = ("to its node", "to other nodes")
"""Streams of what a rank hands on."""


@dataclass(frozen=True, slots=True)
class PassProgram:
    """What a rank does in one pass over one micro-batch; dependencies are indices within the program."""

    actions: tuple[Action, ...]
    output: int = -1
    """The action that makes what the pass hands on."""


def stage_programs(stages: Sequence[StageCosts]) -> dict[tuple[int, Kind], PassProgram]:
    """Passes of one action each, with the seconds and bytes of the stages."""
    programs: dict[tuple[int, Kind], PassProgram] = {}
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    for index, stage in enumerate(stages):
        for kind in kinds:
            allocates, frees = pass_bytes(stage, kind)
            seconds = pass_seconds(stage)[kind]
            programs[index, kind] = PassProgram((
                Action(kind, COMPUTE_STREAM, seconds, allocates=allocates, frees=frees),
            ))  # fmt: skip
    return programs


def pipeline_program(
    schedule: Schedule,
    programs: Mapping[tuple[int, Kind], PassProgram],
    *,
    send_seconds: Sequence[float] | float = 0.0,
    near: Collection[int] = (),
    state_bytes: Sequence[float] = (),
    message_bytes: Sequence[Sequence[float]] = (),
    in_turn: bool = False,
    others: Mapping[PipeAction, PassProgram] = MappingProxyType({}),
) -> list[Action]:
    """All ranks' actions in an order in which each stands behind what it needs.

    `programs` by (stage, kind of pass); `state_bytes` per rank stand before the first action; message_bytes: per rank,
    of every pass in order, what the rank holds of messages while it runs. in_turn: of a
    single rank: each pass begins behind the end of the one before, not as soon as its streams are free, under the names
    of its own actions. others: passes with a program of their own. Raises ConfigurationError for a pass without a
    program, and where ranks wait for each other.
    """
    num_stages = schedule.num_stages
    sends = send_list(send_seconds, num_stages)
    actions = [
        Action("states", COMPUTE_STREAM, 0.0, rank=rank, allocates=live) for rank, live in enumerate(state_bytes)
    ]
    arrived: dict[tuple[int, str, int], int] = {}
    messages = [iter(held) for held in message_bytes]
    for rank, action in runnable_order(schedule):
        needed = schedule.awaited(action)
        inputs: tuple[int, ...] = ()
        if needed is not None:
            inputs = (arrived[(*needed, action.micro_batch)],)
        elif in_turn and actions:
            inputs = (len(actions) - 1,)
        program = others.get(action) or _program_of(programs, action)
        output = len(actions) + range(len(program.actions))[program.output]
        placed = _placed(program, None if in_turn else str(action), rank, len(actions), inputs)
        actions += _beside(placed, next(messages[rank])) if messages else placed
        target = receiver(action, num_stages)
        peer = rank if target is None else schedule.rank_of(target, action.micro_batch)
        if target is not None and peer != rank:
            edge = min(action.stage, target)
            name, stream = f"{action} -> {target}", TO_ITS_NODE if edge in near else TO_OTHER_NODES
            seconds = sends[edge]
            actions.append(Action(name, stream, seconds, (output,), communication=True, rank=rank))
            output = len(actions) - 1
        if action.kind != "W":
            arrived[action.stage, "F" if action.kind == "F" else "gradient", action.micro_batch] = output
    return actions


def _beside(actions: list[Action], held: float) -> list[Action]:
    """The actions of a pass, with bytes that are there from its first kernel to the end of its last one."""
    kernels = [index for index, action in enumerate(actions) if action.stream == COMPUTE_STREAM]
    for index in kernels[:1]:
        actions[index] = replace(actions[index], allocates=actions[index].allocates + held)
    for index in kernels[-1:]:
        actions[index] = replace(actions[index], frees=actions[index].frees + held)
    return actions


def _program_of(programs: Mapping[tuple[int, Kind], PassProgram], action: PipeAction) -> PassProgram:
    program = programs.get((action.stage, action.kind))
    if program is None or not program.actions:
        raise ConfigurationError(f"the schedule has {action}, but stage {action.stage} no program for {action.kind}")
    return program


def _placed(
    program: PassProgram, label: str | None, rank: int, first: int, inputs: tuple[int, ...]
) -> list[Action]:
    """The pass's actions with indices of the whole program; those that wait for nothing wait for the pass's input."""
    is_single = len(program.actions) == 1
    return [
        replace(
            step,
            name=step.name if label is None else label if is_single else f"{label} {step.name}",
            rank=rank,
            depends_on=tuple(first + index for index in step.depends_on) or inputs,
        )
        for step in program.actions
    ]

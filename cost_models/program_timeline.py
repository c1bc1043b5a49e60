"""Passes of a lowered program for the simulator: every kernel and collective of a rank, with the bytes it brings.

The runtime starts a collective in front of its first reader and waits for it at once, so the actions of a pass follow
each other, kernels on the stream "compute" and collectives on the streams of their axes:

    forward    mm 190 us | all_reduce 80 us (tp) | gelu 20 us          live bytes of each node: 8, 12, 12, 10 MB
    actions    mm takes 8 MB | all_reduce takes 4 MB | gelu frees 2 MB, and 10 MB stay for backward

An action takes what lives at the fullest of its nodes beyond what was left before, and frees all but what lives on
behind it. So the simulated peak is that of the live ranges (`passes/live_ranges.py`), and what forward leaves is what
backward finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.memory import bytes_over_time
from autopar.cost_models.pipeline_program import PassProgram
from autopar.cost_models.program_costs import COMPUTE, ProgramAction
from autopar.cost_models.simulator import Action
from autopar.passes.live_ranges import memory_events
from autopar.passes.partition import Partition
from autopar.schedules.actions import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBytes:
    """Bytes of one pass: `live` at every node of its graph, `before` its first node and `after` its last one."""

    live: tuple[float, ...]
    before: float
    after: float


def bytes_of_passes(partition: Partition) -> tuple[PassBytes, PassBytes]:
    """(forward, backward) of one micro-batch: activations, saved values, gathered parameters, gradients and inputs.

    What is left behind backward are gradients and outputs; a partition without backward leaves its outputs.
    """
    live = tuple(float(held) for held in bytes_over_time(memory_events(partition)))
    turn = sum(node.op != "output" for node in partition.forward.graph.nodes)
    forward, backward = live[:turn], live[turn:]
    end = backward[-1] if backward else forward[-1] if forward else 0.0
    saved = min(forward[-1], backward[0]) if forward and backward else end
    return PassBytes(live=forward, before=0.0, after=saved), PassBytes(live=backward, before=saved, after=end)


def pass_program(actions: Sequence[ProgramAction], held: PassBytes) -> PassProgram:
    """The actions of one pass, in program order, each behind the one before it."""
    if not actions:
        return PassProgram((Action("nothing", COMPUTE, 0.0, allocates=held.after - held.before),))
    ends = [action.position for action in actions[1:]] + [len(held.live)]
    found: list[Action] = []
    left, start = held.before, 0
    for action, end in zip(actions, ends, strict=True):
        inside, after = held.live[start:end], held.live[end : end + 1]
        full = max(inside, default=left)
        rest = min(inside[-1:] + after, default=full) if after else held.after
        full = max(full, left, rest)
        found.append(
            Action(
                f"{action.name}: {action.kind}",
                action.stream,
                action.seconds,
                depends_on=(len(found) - 1,) if found else (),
                communication=action.stream != COMPUTE,
                allocates=full - left,
                frees=full - rest,
            )
        )
        left, start = rest, end
    return PassProgram(tuple(found))


def halves_of_backward(
    inputs: Sequence[ProgramAction], weights: Sequence[ProgramAction], whole: PassBytes, kept_bytes: float
) -> dict[Kind, PassProgram]:
    """I and W of a backward whose bytes are those of the `whole`: the transients are I's, `kept_bytes` stay for W."""
    peak = float(np.max(whole.live, initial=whole.before))
    kept = min(kept_bytes, peak - whole.after)
    early = PassBytes(live=(peak,) * (1 + max((a.position for a in inputs), default=0)), before=whole.before,
                      after=whole.after + kept)  # fmt: skip
    late = PassBytes(live=(early.after,) * (1 + max((a.position for a in weights), default=0)), before=early.after,
                     after=whole.after)  # fmt: skip
    return {"I": pass_program(inputs, early), "W": pass_program(weights, late)}

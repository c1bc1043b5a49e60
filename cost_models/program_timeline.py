"""Passes of a lowered program for the simulator: every kernel and collective of a rank, with the bytes it brings.

Kernels follow each other on the stream "compute", collectives on the stream of their axes, copies to the host and back
on a stream per direction. A collective or a copy is started behind the kernels in front of it, and what stands behind
its wait begins when it has ended:

    graph      mm | start all_reduce | mm_1 | wait | gelu              live bytes of each node: 8, 12, 20, 20, 10 MB
    compute    mm 190 us | mm_1 190 us | gelu 20 us                    takes 12 MB | takes 8 MB | frees 10 MB, ...
    tp                   | all_reduce 80 us                            beside mm_1

A kernel takes what lives at the fullest node up to the next kernel beyond what was left before, and frees all but what
lives on behind it. So the simulated peak is that of the live ranges (`graphs/live_ranges.py`), and what forward leaves
is what backward finds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.cost_models.pipeline_program import PassProgram
from autopar.cost_models.program_costs import COMPUTE, ProgramAction
from autopar.cost_models.simulator import Action
from autopar.graphs.collective_nodes import WAIT, is_start
from autopar.graphs.copy_nodes import WAIT_COPY


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBytes:
    """Bytes of one pass: `live` at every node of its graph, `before` its first node and `after` its last one."""

    live: tuple[float, ...]
    before: float
    after: float


LEFT_OPEN = sys.maxsize
"""In the place of a wait: behind the graph."""


def wait_positions(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Of every collective and copy of a graph's nodes that is awaited: position of its start -> of its first wait,
    `LEFT_OPEN` of a collective that the graph returns as it is."""
    place: dict[fx.Node, int] = {}
    waits: dict[int, int] = {}
    for position, node in enumerate(nodes):
        place[node] = position
        if (node.target is WAIT or node.target is WAIT_COPY) and node.all_input_nodes[0].op != "placeholder":
            waits.setdefault(place[node.all_input_nodes[0]], position)
        elif node.op == "output":
            waits.update((place[value], LEFT_OPEN) for value in node.all_input_nodes if is_start(value))
    return waits


def issued(
    actions: Sequence[ProgramAction], waits: Mapping[int, int], positions: Iterable[int] | None = None
) -> list[Action]:
    """The actions of one pass, in program order, each behind what it has to wait for; an action without length at the
    end waits for the rest. waits: of `wait_positions`; a collective that it does not name is awaited at once. What a
    collective takes of the processor stands between the kernels. positions: of the actions, where they stand in another
    order than that of their graph."""
    return _issued(actions, waits, positions)[0]


def _issued(
    actions: Sequence[ProgramAction], waits: Mapping[int, int], positions: Iterable[int] | None = None
) -> tuple[list[Action], list[int]]:
    """The actions, and where kernels and the last wait are among them."""
    if positions is None:
        positions = [action.position for action in actions]
    found: list[Action] = []
    kernels: list[int] = []
    flying: list[tuple[int, int]] = []
    last: tuple[int, ...] = ()
    landed: list[int] = []
    for action, position in zip(actions, positions, strict=True):
        if flying:
            landed += [index for wait, index in flying if wait < position]
            flying = [(wait, index) for wait, index in flying if wait >= position]
        depends_on = (*last, *landed)
        is_kernel = action.stream == COMPUTE
        name = f"{action.name}: {action.kind}"
        if is_kernel:
            kernels.append(len(found))
            last, landed = (len(found),), []
        else:
            if action.host_seconds:
                found.append(Action(f"{name}, host", COMPUTE, action.host_seconds, depends_on))
                last, landed, depends_on = (len(found) - 1,), [], (len(found) - 1,)
            flying.append((waits.get(position, position), len(found)))
        seconds = action.seconds - action.host_seconds
        found.append(Action(name, action.stream, seconds, depends_on, communication=not is_kernel))
    left = (*landed, *(index for wait, index in flying if wait != LEFT_OPEN))
    if left:
        kernels.append(len(found))
        found.append(Action("waits", COMPUTE, 0.0, (*last, *left)))
    return found, kernels


def pass_program(actions: Sequence[ProgramAction], held: PassBytes, waits: Mapping[int, int]) -> PassProgram:
    """The actions of one pass with their bytes; waits: of `wait_positions`."""
    found, kernels = _issued(actions, waits)
    if not found:
        found, kernels = [Action("nothing", COMPUTE, 0.0)], [0]
    positions = [action.position for action in actions if action.stream == COMPUTE]
    ends = [*positions[1:], *[len(held.live)] * len(kernels)][: len(kernels)]
    left, start = held.before, 0
    for index, end in zip(kernels, ends, strict=True):
        inside, after = held.live[start:end], held.live[end : end + 1]
        full = max(inside, default=left)
        rest = min(inside[-1:] + after, default=full) if after else held.after
        full = max(full, left, rest)
        found[index] = replace(found[index], allocates=full - left, frees=full - rest)
        left, start = rest, end
    return PassProgram(tuple(found), kernels[-1] if kernels else -1)

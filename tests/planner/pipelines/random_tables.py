"""Random block tables and a search over all cuts, against which the stage search is checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.stage_search import CutQuestion

MODES = 3


def random_table(
    rng: np.random.Generator, num_blocks: int, devices: int = 1, group: int = 0, capacity_bytes: float = 1e9
) -> BlockTable:
    """Blocks of 0.5 to 2 s forward on one device; recomputation saves bytes and costs seconds."""
    forward = rng.uniform(0.5, 2.0, (1, num_blocks)) * np.ones((MODES, 1)) / devices
    saved = rng.uniform(0.5, 2.0, (1, num_blocks)) * np.array([[1.0], [0.5], [0.1]]) / devices
    return BlockTable(
        name=f"{devices} devices of group {group}",
        devices=devices,
        group=group,
        capacity_bytes=capacity_bytes,
        forward_seconds=forward,
        backward_seconds=forward * np.linspace(1.0, 1.5, MODES)[:, None],
        weight_seconds=forward,
        saved_bytes=saved,
        weight_saved_bytes=0.5 * saved,
        forward_extra_bytes=rng.uniform(0.0, 0.5, (MODES, num_blocks)),
        backward_extra_bytes=rng.uniform(0.0, 1.0, (MODES, num_blocks)),
        state_bytes=rng.uniform(0.5, 2.0, num_blocks) / devices,
        once_seconds=rng.uniform(0.0, 0.1, num_blocks),
        send_bytes=np.ones(num_blocks - 1),
        send_seconds=rng.uniform(0.0, 0.1, num_blocks - 1),
    )


def scaled(table: BlockTable, devices: int, group: int = 0, speed: float = 1.0) -> BlockTable:
    """The same blocks on more devices, of which each does a little less."""
    by = 1.0 / (devices**0.93 * speed)
    return replace(
        table,
        devices=devices,
        group=group,
        forward_seconds=table.forward_seconds * by,
        backward_seconds=table.backward_seconds * by,
        weight_seconds=table.weight_seconds * by,
        saved_bytes=table.saved_bytes / devices,
        backward_extra_bytes=table.backward_extra_bytes / devices,
        state_bytes=table.state_bytes / devices,
    )


def least_of_all_cuts(question: CutQuestion, *, with_memory: bool = True) -> float:
    """The smallest objective over every cut, sub-mesh and way of recomputation, one by one; infinity: none fits."""
    found = [np.inf]

    def extend(first: int, left: tuple[int, ...], stages: list[tuple[int, int, BlockTable]]) -> None:
        if first == question.num_blocks:
            if not any(left) and len(stages) >= question.least_stages:
                found.append(_objective(question, stages, with_memory))
            return
        if len(stages) == len(question.in_flight):
            return
        for table in question.tables:
            if question.sizes and table.devices != question.sizes[len(stages)]:
                continue
            rest = tuple(size - (table.devices if g == table.group else 0) for g, size in enumerate(left))
            if min(rest) >= 0:
                for end in range(first + 1, question.num_blocks + 1):
                    extend(end, rest, [*stages, (first, end, table)])

    extend(0, question.devices, [])
    return min(found)


def _objective(question: CutQuestion, stages: list[tuple[int, int, BlockTable]], with_memory: bool) -> float:
    seconds, sends = [], 0.0
    for ahead, (first, end, table) in enumerate(stages):
        in_flight = question.in_flight[len(stages) - 1 - ahead]
        ways = []
        for mode in range(MODES):
            costs = table.stage(first, end, mode)
            held = costs.state_bytes + in_flight * costs.saved_bytes
            held += max(costs.forward_extra_bytes, costs.backward_extra_bytes)
            if held <= table.capacity_bytes or not with_memory:
                ways.append(costs.compute_seconds)
        if not ways:
            return float(np.inf)
        seconds.append(min(ways))
        if end < question.num_blocks:
            sends += 2.0 * float(table.sends_to(stages[ahead + 1][2].group)[end - 1])
    return sum(seconds) + sends + (question.micro_batches - 1) * max(seconds)

"""Whether a recorded step is the one that was planned: kernels, sizes, dtypes, devices, and the peak of its bytes.

    faults(record, planned_bytes(record.lowered, states, device))
    ["layers.0/attention#0: makes a value of 512.0 MiB, its operands and results have at most 2.0 MiB",
     "the host waits for _local_scalar_dense in loss/mul#0"]

The optimizer updates all parameters in one call. What the allocator rounds up or keeps, NCCL's own buffers and the
workspace inside of a kernel are on no side of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import fx

from autopar.cost_models.optimizer_step import FUSED
from autopar.explain.held_memory import HeldMemory
from autopar.explain.memory_pieces import OPTIMIZER, PARAMETERS
from autopar.graphs.kernel_groups import added_product, kernel_groups
from autopar.graphs.node_values import is_getitem, node_bytes
from autopar.graphs.operator_names import base_name
from autopar.graphs.working_bytes import working_bytes
from autopar.hardware.devices import Device
from autopar.passes.lowering.stage import LoweredStep
from autopar.planner.memory.resident_states import peak_bytes, resident_states
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.plans.plan_text import format_bytes
from autopar.simulation.priced_stages import step_graphs
from autopar.simulation.step_program import StepProgram
from benchmarks.fake_cuda.rank_step import Record
from benchmarks.fake_cuda.record import Form

PEAK_TOLERANCE = 0.02
SMALL_BYTES = 1 << 20
"""Values up to this size may be larger than what they are made of: counts, offsets, seeds, sums of rows."""
LAYOUT_OPERATORS = frozenset([
    "contiguous", "clone", "padded", "trimmed", "piece", "region", "pieces_first", "pieces_joined", "_to_copy",
    "packed", "packed_rows", "rows_part", "rows_joined", "resolve_conj", "row_chunk"
])  # fmt: skip
"""Operators that are priced as a copy, and make none where their operand lies as it is wanted."""

STATISTICS = frozenset([
    "native_layer_norm", "native_group_norm", "_native_batch_norm_legit_functional", "normalise_batch"
])  # fmt: skip
"""Norms whose further results CUDA keeps in float32, where the CPU, on which models are captured, keeps the dtype."""


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """Most bytes of forward and backward beside what is resident, and of all, the optimizer's step included."""

    step: float
    peak: float


def planned_bytes(lowered: LoweredStep, states: Mapping[str, StateBytes], device: Device) -> PlannedBytes:
    """Of the rank of a step without stages. states: of a step in one part."""
    without = {name: replace(state, optimizer=0.0, step_buffers=FUSED) for name, state in states.items()}
    parameters = resident_states(lowered.only.program, states, device).parameters
    return PlannedBytes(
        step=peak_bytes(lowered, without, device) - parameters, peak=peak_bytes(lowered, states, device)
    )


def planned_stage_bytes(step: StepProgram, rank: int) -> PlannedBytes:
    """Of a rank of a pipeline: what `autopar memory` says of it. step: of the whole plan."""
    plan, group = step.plan, step.plan.group_of(rank)
    graphs = step_graphs(plan, step.micro or step.program, step.cluster, rank - plan.rank_groups[group].first_rank)
    held = HeldMemory(step, graphs, group)
    resident = sum(size for _, kind, size in held.states if kind in (PARAMETERS, OPTIMIZER))
    fullest = max(moment.bytes for moment in held.moments if moment.action is not None)
    return PlannedBytes(step=held.constant + fullest - resident, peak=held.peak)


def faults(record: Record, planned: PlannedBytes) -> list[str]:
    """What is not as planned, a sentence each."""
    found = [*_hosts(record), *_sizes(record), *_forms(record), *_kernels(record)]
    for what, have, want in (
        ("forward and backward hold", record.step_bytes, planned.step),
        ("parameters, optimizer and step hold", record.peak_bytes, planned.peak),
    ):
        if abs(have - want) > PEAK_TOLERANCE * want:
            found.append(
                f"{what} {format_bytes(have)} at the fullest moment, {have / want - 1.0:+.1%} of the planned "
                f"{format_bytes(want)}"
            )
    return found


def _hosts(record: Record) -> Iterator[str]:
    """Tensors on the host, and what the host waits for."""
    for call in record.calls:
        place = record.place(call.turn)
        if call.waits:
            yield f"the host waits for {call.name} in {place}"
        elif "cpu" in call.devices and call.launches:
            yield f"{call.name} in {place} reads or makes a tensor on the host"


def _sizes(record: Record) -> Iterator[str]:
    """Values larger than everything that their operator reads and returns."""
    for storage in record.storages:
        if storage.turn is None or storage.bytes <= SMALL_BYTES:
            continue
        node = record.turns[storage.turn].node
        largest = max(working_bytes(node), *map(node_bytes, (node, *node.all_input_nodes, *node.users)))
        if storage.bytes > largest:
            yield (
                f"{record.place(storage.turn)} makes a value of {format_bytes(storage.bytes)}, its operands and "
                f"results have at most {format_bytes(largest)}"
            )


def _forms(record: Record) -> Iterator[str]:
    """Results of another shape or dtype than the lowered graph says."""
    for node, turns in _in_order(record):
        shapes, dtypes = node.meta.get("local_shape"), node.meta.get("dtype")
        if shapes is None or dtypes is None or _is_statistic(node):
            continue
        if base_name(node.target) in STATISTICS:
            shapes, dtypes = shapes[:1], dtypes[:1]
        pairs = [(shapes, dtypes)] if isinstance(dtypes, torch.dtype) else zip(shapes, dtypes, strict=True)
        planned: list[Form | None] = [None if shape is None else (tuple(shape), dtype) for shape, dtype in pairs]
        for have, want in zip(record.turns[turns[-1]].results, planned, strict=False):
            if have is not None and want is not None and have != want:
                yield f"{record.place(turns[-1])} returns {have}, planned {want}"


def _in_order(record: Record) -> Iterator[tuple[fx.Node, list[int]]]:
    """The nodes of lowered graphs as they ran, with their turns: several where a product took a bias in."""
    for node, turns in groupby(range(len(record.turns)), lambda number: record.turns[number].node):
        yield node, list(turns)


def _is_statistic(node: fx.Node) -> bool:
    if not is_getitem(node):
        return False
    source, index = node.all_input_nodes[0], node.args[1]
    return isinstance(index, int) and index > 0 and base_name(source.target) in STATISTICS


def _kernels(record: Record) -> Iterator[str]:
    """Kernels that `kernel_groups` does not have, or that it has and nothing runs."""
    launched: dict[int, list[str]] = {}
    for call in record.calls:
        if call.launches and call.turn is not None:
            launched.setdefault(call.turn, []).append(call.name)
    groups: dict[fx.Graph, Mapping[fx.Node, int]] = {}
    for node, turns in _in_order(record):
        if node.graph not in groups:
            groups[node.graph] = kernel_groups(node.graph, "eager")
        names = [name for turn in turns for name in launched.get(turn, [])]
        yield from _kernels_of(record.place(turns[0]), node, groups[node.graph], names)


def _kernels_of(place: str, node: fx.Node, groups: Mapping[fx.Node, int], launched: Sequence[str]) -> Iterator[str]:
    name = base_name(node.target)
    if node not in groups:
        if launched:
            yield f"{name} in {place} runs {', '.join(launched)}, and is priced as no kernel"
        return
    is_torch = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
    if not launched and name not in LAYOUT_OPERATORS:
        yield f"{name} in {place} is priced as a kernel, and runs none"
    elif is_torch and list(launched) not in ([name], _fused(node, groups)):
        yield f"{name} in {place} runs {', '.join(launched) or 'nothing'}"


def _fused(node: fx.Node, groups: Mapping[fx.Node, int]) -> list[str]:
    """What runs for an addition that shares its kernel with a product."""
    if list(groups.values()).count(groups[node]) == 1:
        return [base_name(node.target)]
    return ["addmm" if added_product(node) is None else "addmm_"]

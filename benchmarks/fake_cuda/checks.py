"""Whether a recorded step is the one that was planned: kernels, sizes, dtypes, devices, and the peak of its bytes.

    faults(record, peak)
    ["layers.0/attention#0: makes a value of 512.0 MiB, its operands and results have at most 2.0 MiB",
     "the host waits for _local_scalar_dense in loss/mul#0"]

The peak is that of what a step itself makes: inputs, activations, saved values, gradients, totals and what collectives
move, over parameters. State and temporaries of the optimizer are not run, and what the allocator rounds up or keeps,
NCCL's own buffers and the workspace inside of a kernel are on no side of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import fx

from autopar.graphs.kernel_groups import added_product, kernel_groups
from autopar.graphs.live_ranges import bytes_over_time, memory_events
from autopar.graphs.node_values import is_getitem, node_bytes
from autopar.graphs.operator_names import base_name
from autopar.passes.lowering.stage import LoweredStep
from autopar.plans.plan_text import format_bytes
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

STATISTICS = frozenset(["native_layer_norm", "native_group_norm"])
"""Norms whose further results CUDA keeps in float32, where the CPU, on which models are captured, keeps the dtype."""


def faults(record: Record, peak_bytes: float) -> list[str]:
    """What is not as planned, a sentence each. peak_bytes: predicted of the step itself (`predicted_step_bytes`)."""
    found = [*_hosts(record), *_sizes(record), *_forms(record), *_kernels(record)]
    share = record.step_bytes / peak_bytes
    if abs(share - 1.0) > PEAK_TOLERANCE:
        found.append(
            f"the step holds {format_bytes(record.step_bytes)} at its fullest, {share - 1.0:+.1%} of the predicted "
            f"{format_bytes(peak_bytes)}"
        )
    return found


def predicted_step_bytes(lowered: LoweredStep) -> float:
    """The fullest moment of forward and backward of a step without stages, without what lives throughout."""
    return float(bytes_over_time(memory_events(lowered.only.partition)).max())


def _hosts(record: Record) -> Iterator[str]:
    """Tensors on the host, and what the host waits for."""
    for call in record.calls:
        place = record.place(call.turn)
        if call.waits:
            yield f"the host waits for {call.name} in {place}"
        elif "cpu" in call.devices:
            yield f"{call.name} in {place} reads or makes a tensor on the host"


def _sizes(record: Record) -> Iterator[str]:
    """Values larger than everything that their operator reads and returns."""
    for storage in record.storages:
        if storage.turn is None or storage.bytes <= SMALL_BYTES:
            continue
        node = record.turns[storage.turn].node
        largest = max(map(node_bytes, (node, *node.all_input_nodes, *node.users)))
        if storage.bytes > largest:
            yield (
                f"{record.place(storage.turn)} makes a value of {format_bytes(storage.bytes)}, its operands and "
                f"results have at most {format_bytes(largest)}"
            )


def _forms(record: Record) -> Iterator[str]:
    """Results of another shape or dtype than the lowered graph says."""
    for number, turn in enumerate(record.turns):
        shapes, dtypes = turn.node.meta.get("local_shape"), turn.node.meta.get("dtype")
        if shapes is None or dtypes is None or _is_statistic(turn.node):
            continue
        if base_name(turn.node.target) in STATISTICS:
            shapes, dtypes = shapes[:1], dtypes[:1]
        single = isinstance(dtypes, torch.dtype)
        planned: Sequence[Form | None] = [(tuple(shapes), dtypes)] if single else [
            None if shape is None else (tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]  # fmt: skip
        for have, want in zip(turn.results, planned, strict=False):
            if have is not None and want is not None and have != want:
                yield f"{record.place(number)} returns {have}, planned {want}"


def _is_statistic(node: fx.Node) -> bool:
    return is_getitem(node) and node.args[1] in (1, 2) and base_name(node.all_input_nodes[0].target) in STATISTICS


def _kernels(record: Record) -> Iterator[str]:
    """Kernels that `kernel_groups` does not have, or that it has and nothing runs."""
    launched: dict[int, list[str]] = {}
    for call in record.calls:
        if call.launches and call.turn is not None:
            launched.setdefault(call.turn, []).append(call.name)
    groups: dict[fx.Graph, Mapping[fx.Node, int]] = {}
    for graph, turns in groupby(enumerate(record.turns), lambda each: each[1].node.graph):
        if graph not in groups:
            groups[graph] = kernel_groups(graph, "eager")
        for number, turn in turns:
            yield from _kernels_of(record, number, turn.node, groups[graph], launched.get(number, []))


def _kernels_of(
    record: Record, number: int, node: fx.Node, groups: Mapping[fx.Node, int], launched: Sequence[str]
) -> Iterator[str]:
    name, place = base_name(node.target), record.place(number)
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

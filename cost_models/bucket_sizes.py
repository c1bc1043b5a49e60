"""Bucket sizes: how many bytes of gradients or parameters travel together, by playing the step with each size.

    sizes       backward played                                               64 gradients of 1 MB, 3 ms + 4 ms/MB
    none        compute 0.3 s, all_reduce 64 x 7 ms = 0.45 s                  0.45 s
    16 MB       the same compute, all_reduce 4 x 67 ms = 0.27 s, + packing    0.34 s: the first bucket waits longest

A larger bucket saves starts and loses overlap. Kernels keep their prices in every order, so they are priced once; the
collectives, and the copies that pack and unpack, are priced for every size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.cluster import Cluster
from autopar.cost_models.kernel_groups import Traffic
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.operator_names import base_name
from autopar.cost_models.program_costs import (
    COMPUTE,
    ProgramAction,
    collective_action,
    collective_of,
    describe_values,
    program_actions,
)
from autopar.cost_models.program_timeline import issued, wait_positions
from autopar.cost_models.simulator import Timeline, simulate
from autopar.layout import Mesh
from autopar.ops.buckets import packed, packed_rows, rows_part
from autopar.passes.bucket_collectives import KINDS, buckets, with_buckets
from autopar.passes.collectives import describe
from autopar.passes.early_starts import early_order
from autopar.passes.partition import Partition

MIB = 2**20
SIZES = (0.0, 1.0 * MIB, 4.0 * MIB, 16.0 * MIB, 64.0 * MIB, 256.0 * MIB)
"""Tried for all kinds of collectives at once; neighbours differ by a few per cent of a step."""
LARGE_PROGRAM = 20_000
"""Nodes of both passes above which every second size is tried: a step of 126 layers takes seconds to play."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """How a rank issues the collectives of a micro-batch: in buckets of these sizes, and what that gives."""

    bucket_bytes: Mapping[str, float] | None
    """None: one by one, each awaited where it starts."""
    passes: tuple[Timeline, ...]

    @property
    def seconds(self) -> float:
        """Of forward and backward."""
        return sum(timeline.makespan_seconds for timeline in self.passes)

    @property
    def compute_seconds(self) -> float:
        return sum(timeline.compute_seconds for timeline in self.passes)

    @property
    def exposed_communication_seconds(self) -> float:
        return sum(timeline.exposed_communication_seconds for timeline in self.passes)


def issues(partition: Partition, *, cluster: Cluster, mesh: Mesh, backend: str) -> list[Issue]:
    """What the sizes give, the fastest first and of equals the smallest; sizes that join the same count once. Last
    comes what takes the least memory: as lowered, each collective awaited where it starts.

    partition: as lowered, without buckets. mesh and backend: as of `program_actions`.
    """
    prices = KernelPrices(device=cluster.device)
    phases = zip(("forward", "backward"), partition.graphs, strict=False)
    passes = [_Pass(part.graph, phase, cluster, mesh, backend, prices) for phase, part in phases]
    found: dict[tuple[tuple[str, ...], ...], Issue] = {}
    nodes = sum(len(part.graph.nodes) for part in partition.graphs)
    for size in SIZES[:: 1 + (nodes > LARGE_PROGRAM)]:
        bucket_bytes = dict.fromkeys(KINDS.values(), size) if size else {}
        joined = tuple(names for one in passes for names in one.joined(bucket_bytes))
        if joined not in found:
            played = tuple(one.play(bucket_bytes) for one in passes)
            found[joined] = Issue(bucket_bytes=bucket_bytes, passes=played)
    as_lowered = Issue(bucket_bytes=None, passes=tuple(one.play(None) for one in passes))
    return [*sorted(found.values(), key=lambda issue: issue.seconds), as_lowered]


class _Pass:
    """One graph of a rank, whose kernels are priced once."""

    def __init__(
        self, graph: fx.Graph, phase: str, cluster: Cluster, mesh: Mesh, backend: str, prices: KernelPrices
    ) -> None:
        self._graph, self._phase, self._cluster, self._mesh, self._prices = graph, phase, cluster, mesh, prices
        nodes = list(graph.nodes)
        self._collectives = describe(nodes)
        actions = program_actions(
            graph, phase, cluster=cluster, mesh=mesh, backend=backend, prices=prices, segment_of=str
        )
        self._kernels = {nodes[action.position].name: action for action in actions if action.stream == COMPUTE}

    def joined(self, bucket_bytes: Mapping[str, float]) -> list[tuple[str, ...]]:
        """The names of the collectives in every bucket."""
        return [tuple(member.name for member in members) for members in buckets(self._collectives, bucket_bytes)]

    def play(self, bucket_bytes: Mapping[str, float] | None) -> Timeline:
        """The pass with such buckets."""
        nodes = with_buckets(self._graph, bucket_bytes) if bucket_bytes else list(self._graph.nodes)
        order = nodes if bucket_bytes is None else early_order(nodes)
        describe_values(order)
        return simulate(issued(list(self._actions(order)), wait_positions(order)))

    def _actions(self, order: Sequence[fx.Node]) -> Iterator[ProgramAction]:
        for position, node in enumerate(order):
            collective = collective_of(node)
            if collective is not None:
                action = collective_action(node, collective, self._phase, self._cluster, self._mesh)
                yield replace(action, position=position)
            elif node.name in self._kernels:
                yield replace(self._kernels[node.name], position=position)
            elif node.target in (packed, packed_rows, rows_part):
                yield self._copy(node, position)

    def _copy(self, node: fx.Node, position: int) -> ProgramAction:
        traffic = Traffic(reads=tuple(node.all_input_nodes), writes=(0,))
        return ProgramAction(
            name=str(node.meta["operator"]), phase=self._phase, stream=COMPUTE, kind=base_name(node.target),
            seconds=self._prices.seconds([(node, traffic)]), position=position,
        )  # fmt: skip

"""Bucket sizes and chunks: how many bytes of gradients or parameters travel together, and into how many chunks a
product is cut beside the collective of its rows, by playing the step with each.

    sizes       backward played                                               64 gradients of 1 MB, 3 ms + 4 ms/MB
    none        compute 0.3 s, all_reduce 64 x 7 ms = 0.45 s                  0.45 s
    16 MB       the same compute, all_reduce 4 x 67 ms = 0.27 s, + packing    0.34 s: the first bucket waits longest

A larger bucket saves starts and loses overlap. Kernels keep their prices in every order, so they are priced once; the
collectives, and the copies that pack and unpack, are priced for every size.

Chunks are tried with the fastest sizes that fit into memory, kind by kind: a chunk costs a start and hides the rest of
its collective behind the next chunk's product, so they pay where both take long. They stay where they make the step
shorter by `LEAST_GAIN`. Behind them, products with their collective in symmetric memory are tried in the same way, kind
by kind, for groups that lie inside a node of GPUs with NVLink.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import fx

from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.program_costs import (
    COMPUTE,
    ProgramAction,
    collective_action,
    collective_of,
    program_actions,
    symmetric_actions,
)
from autopar.cost_models.program_timeline import issued, wait_positions
from autopar.cost_models.simulator import Interference, Timeline, simulate
from autopar.graphs.collective_nodes import describe
from autopar.graphs.kernel_groups import Traffic, launches_kernel
from autopar.graphs.node_values import describe_values
from autopar.graphs.operator_names import base_name
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.layouts.placement import Mesh
from autopar.ops.symmetric_products import SYMMETRIC
from autopar.passes.overlap.bucket_collectives import KINDS, buckets, in_buckets
from autopar.passes.overlap.chunk_products import chunked_products, in_chunks
from autopar.passes.overlap.early_starts import early_order
from autopar.passes.overlap.in_symmetric_memory import Groups, in_symmetric_memory, symmetric_products
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import EXCHANGES

MIB = 2**20
SIZES = (0.0, 1.0 * MIB, 4.0 * MIB, 16.0 * MIB, 64.0 * MIB, 256.0 * MIB)
"""Tried for all kinds of collectives at once; neighbours differ by a few per cent of a step."""
CHUNKS = (2, 4, 8)
"""Tried for one kind of collectives after the other, while more make the step shorter."""
LEAST_GAIN = 0.01
"""Share of a step that chunks must save: less is lost in what the simulator does not know."""
LARGE_PROGRAM = 20_000
"""Nodes of both passes above which every second size is tried: a step of 126 layers takes seconds to play."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """How a rank issues the collectives of a step: in buckets of these sizes, products in so many chunks, and
    what that gives."""

    bucket_bytes: Mapping[str, float] | None
    """None: one by one, each awaited where it starts."""
    passes: tuple[Timeline, ...]
    times: tuple[int, ...]
    """How often a step runs each."""
    chunks: Mapping[str, int] = field(default_factory=dict)
    symmetric: Groups = field(default_factory=dict)
    """Per kind of collective, the groups over which products run with it in symmetric memory."""
    ahead_bytes: float = 0.0
    """Of copies between device and host, under way ahead of their readers (`copy_ahead.py`)."""

    @property
    def cuts(self) -> bool:
        """Whether products run in parts, in chunks or in symmetric memory."""
        return bool(self.chunks or self.symmetric)

    def of_plan(self, plan: Plan) -> Plan:
        """The plan that says so; in how many chunks rows travel to their experts is said before."""
        groups = {kind: tuple(found) for kind, found in self.symmetric.items()}
        chunks = {kind: count for kind, count in plan.product_chunks.items() if kind == EXCHANGES} | dict(self.chunks)
        return replace(
            plan,
            bucket_bytes=self.bucket_bytes,
            product_chunks=chunks,
            symmetric_memory=groups,
            copy_ahead_bytes=self.ahead_bytes,
        )

    @property
    def seconds(self) -> float:
        """Of all forward and backward passes of a step."""
        return sum(times * one.makespan_seconds for times, one in zip(self.times, self.passes, strict=True))

    @property
    def compute_seconds(self) -> float:
        """Of all passes together."""
        return sum(times * one.compute_seconds for times, one in zip(self.times, self.passes, strict=True))

    @property
    def exposed_communication_seconds(self) -> float:
        """Of all passes together."""
        found = zip(self.times, self.passes, strict=True)
        return sum(times * one.exposed_communication_seconds for times, one in found)


def issues(
    runs: Sequence[tuple[str, fx.GraphModule, int]],
    *,
    cluster: Cluster,
    mesh: Mesh,
    backend: str,
    chunks: Sequence[int] = CHUNKS,
    symmetric: bool = True,
    fits: Callable[[Issue], bool] = lambda issue: True,
) -> Iterator[Issue]:
    """What the sizes give, the fastest first and of equals the smallest, up to none, from the first on that `fits`;
    sizes that join the same count once. The fastest in chunks with its sizes stands in front, where that is faster
    still, and in front of it the fastest in symmetric memory. Last comes what takes the least memory: as lowered, each
    collective awaited where it starts.

    runs: as of `LoweredStage.runs`, without buckets. mesh and backend: as of `program_actions`. chunks: numbers of them
    to try; symmetric: whether symmetric memory is tried.
    """
    prices = KernelPrices(device=cluster.device)
    passes = [_Pass(module.graph, phase, cluster, mesh, backend, prices) for phase, module, _ in runs]
    counts = tuple(times for _, _, times in runs)
    found: dict[tuple[tuple[str, ...], ...], Issue] = {}
    nodes = sum(len(module.graph.nodes) for _, module, _ in runs)
    for size in SIZES[:: 1 + (nodes > LARGE_PROGRAM)]:
        bucket_bytes = dict.fromkeys(KINDS.values(), size) if size else {}
        joined = tuple(names for one in passes for names in one.joined(bucket_bytes))
        if joined not in found:
            played = tuple(one.play(bucket_bytes) for one in passes)
            found[joined] = Issue(bucket_bytes=bucket_bytes, passes=played, times=counts)
    fastest_first = sorted(found.values(), key=lambda issue: issue.seconds)
    up_to_none = 1 + next(index for index, issue in enumerate(fastest_first) if not issue.bucket_bytes)
    whole = _from_first_that_fits(fastest_first[:up_to_none], fits)
    if whole:
        cut = _in_chunks(passes, whole[0], chunks[:: 1 + (nodes > LARGE_PROGRAM)]) if chunks else []
        best = [*cut, *whole][0]
        in_memory = _in_symmetric_memory(passes, best, whole[0].seconds) if symmetric else []
        yield from (*in_memory, *cut, *whole)
    yield Issue(bucket_bytes=None, passes=tuple(one.play(None) for one in passes), times=counts)


def _from_first_that_fits(up_to_none: Sequence[Issue], fits: Callable[[Issue], bool]) -> Sequence[Issue]:
    """Sizes without those in front that hold too much; nothing where that is so without buckets, which hold least."""
    if fits(up_to_none[0]):
        return up_to_none
    if len(up_to_none) == 1 or not fits(up_to_none[-1]):
        return ()
    return [*itertools.dropwhile(lambda issue: not fits(issue), up_to_none[1:-1]), up_to_none[-1]]


def _in_symmetric_memory(passes: Sequence[_Pass], best: Issue, whole_seconds: float) -> list[Issue]:
    """The fastest way to run products in symmetric memory, with buckets and chunks of `best`; nothing where that does
    not pay."""
    possible = sorted({place for one in passes for place in one.in_symmetric_memory()})
    for kind in dict.fromkeys(kind for kind, _ in possible):
        groups = {**best.symmetric, kind: tuple(group for of, group in possible if of == kind)}
        played = tuple(one.cut(best.chunks, groups).play(best.bucket_bytes) for one in passes)
        issue = replace(best, passes=played, symmetric=groups)
        if issue.seconds < best.seconds - LEAST_GAIN * whole_seconds:
            best = issue
    return [best] if best.symmetric else []


def _in_chunks(passes: Sequence[_Pass], whole: Issue, counts: Sequence[int]) -> list[Issue]:
    """The fastest way to cut products into chunks, with the buckets of `whole`; nothing where that does not pay."""
    best = whole
    hidden = [
        {kind: times * seconds for kind, seconds in one.hidden_at_most().items()}
        for times, one in zip(whole.times, passes, strict=True)
    ]
    for kind in sorted({kind for seconds in hidden for kind in seconds}):
        if sum(seconds.get(kind, 0.0) for seconds in hidden) < LEAST_GAIN * whole.seconds:
            continue
        for count in counts:
            chunks = {**best.chunks, kind: count}
            played = tuple(one.cut(chunks).play(whole.bucket_bytes) for one in passes)
            issue = replace(whole, passes=played, chunks=chunks)
            if issue.seconds > best.seconds - LEAST_GAIN * whole.seconds:
                break
            best = issue
    return [best] if best.chunks else []


class _Pass:
    """One graph of a rank, whose kernels and collectives are priced once."""

    def __init__(
        self, graph: fx.Graph, phase: str, cluster: Cluster, mesh: Mesh, backend: str, prices: KernelPrices
    ) -> None:
        self._phase, self._cluster, self._mesh, self._prices = phase, cluster, mesh, prices
        nodes = list(graph.nodes)
        self._known: dict[str, list[ProgramAction]] = {node.name: [] for node in nodes}
        for action in program_actions(
            graph, phase, cluster=cluster, mesh=mesh, backend=backend, prices=prices, segment_of=str
        ):
            self._known[nodes[action.position].name].append(action)
        self._graph = graph  # buckets are written into it and taken back
        self._read()

    def _read(self) -> None:
        self._nodes = list(self._graph.nodes)
        self._collectives = describe(self._nodes)
        self._timelines: dict[tuple[tuple[str, ...], ...], Timeline] = {}

    def cut(self, chunks: Mapping[str, int], symmetric: Groups = MappingProxyType({})) -> _Pass:
        """The same pass with products in symmetric memory and in chunks; what stays keeps its prices."""
        cut = copy.copy(self)
        if symmetric:
            cut._graph = in_symmetric_memory(cut._graph, symmetric)
        if chunks:
            cut._graph = in_chunks(cut._graph, chunks)
        cut._read()
        return cut

    def in_symmetric_memory(self) -> set[tuple[str, str]]:
        """(kind of collective, group) of products that could run so: on GPUs whose NVLink gives access to each other's
        memory (many on PCIe have none), in a group inside of a node."""
        if self._cluster.device.kind != "cuda" or self._cluster.intra_link.traits.interface != "nvlink":
            return set()
        found = {(product.kind, product.group) for product in symmetric_products(self._collectives)}
        return {(kind, group) for kind, group in found if self._is_inside_a_node(group)}

    def _is_inside_a_node(self, group: str) -> bool:
        axes = [self._mesh.axis_names.index(name) for name in group.split("+")]
        return GroupTopology.of(self._cluster, self._mesh.shape, axes).nodes == 1

    def hidden_at_most(self) -> dict[str, float]:
        """Per kind of collective: seconds that run beside each other at most where products are cut into chunks."""
        found: dict[str, float] = defaultdict(float)
        for product in chunked_products(self._collectives):
            kernels = self._actions_of(product.product)
            if kernels and product.divides(CHUNKS[0]):
                (moved,) = self._actions_of(product.start)
                found[product.kind] += min(moved.seconds, kernels[0].seconds)
        return found

    def joined(self, bucket_bytes: Mapping[str, float]) -> list[tuple[str, ...]]:
        """The names of the collectives in every bucket."""
        return [tuple(member.name for member in members) for members in buckets(self._collectives, bucket_bytes)]

    def play(self, bucket_bytes: Mapping[str, float] | None) -> Timeline:
        """The pass with such buckets; sizes that join the same are played once."""
        if bucket_bytes is None:
            return self._played(self._nodes)
        joined = tuple(self.joined(bucket_bytes))
        if joined not in self._timelines:
            with in_buckets(self._graph, self._nodes, self._collectives, bucket_bytes) as nodes:
                order = early_order(nodes, describe(nodes) if joined else self._collectives)
                self._timelines[joined] = self._played(order)
        return self._timelines[joined]

    def _played(self, order: Sequence[fx.Node]) -> Timeline:
        describe_values(order)
        beside = Interference(compute=self._cluster.overlap_slowdown)
        placed = [(action, position) for position, node in enumerate(order) for action in self._actions_of(node)]
        actions, positions = zip(*placed, strict=True) if placed else ((), ())
        return simulate(issued(actions, wait_positions(order), positions), beside)

    def _actions_of(self, node: fx.Node) -> Sequence[ProgramAction]:
        """What a node runs, at any position."""
        known = self._known.get(node.name)
        if known is not None:
            return known
        if node.target in SYMMETRIC:
            return symmetric_actions(node, self._phase, self._cluster, self._mesh, self._prices)
        collective = collective_of(node)
        if collective is not None:
            return (collective_action(node, collective, self._phase, self._cluster, self._mesh),)
        return (self._added(node),) if launches_kernel(node) else ()

    def _added(self, node: fx.Node) -> ProgramAction:
        """A copy of a bucket, or a kernel of a chunk: one by itself."""
        traffic = Traffic(reads=tuple(node.all_input_nodes), writes=(0,))
        return ProgramAction(
            name=str(node.meta["operator"]), phase=self._phase, stream=COMPUTE, kind=base_name(node.target),
            seconds=self._prices.seconds([(node, traffic)]),
        )  # fmt: skip

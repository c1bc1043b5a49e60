"""Prices: what every strategy and every redistribution costs in seconds on one cluster and mesh.

The planner's Problem and the prediction of a plan ask the same object, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost_models.collective_costs import CollectiveKind, collective_seconds
from autopar.cost_models.kernel_seconds import dtype_name
from autopar.cost_models.operator_costs import copy_seconds, element_flops, operator_seconds
from autopar.cost_models.operator_sizes import AttentionSizes, Parts, RowSizes, Sizes, flops_of, has_sizes, sizes_of
from autopar.cost_models.operators_attention import keys_in_window, keys_in_zigzag
from autopar.graphs.expert_capacity import capacity_of, places_per_expert
from autopar.graphs.expert_loads import load_of, replicated_of
from autopar.graphs.kernel_groups import Traffic, bytes_moved
from autopar.graphs.operator_names import (
    FLOAT8_PRODUCTS,
    TILED_MLPS,
    base_name,
    curve_name,
    is_causal,
    operator_kind,
    window_of,
)
from autopar.graphs.rows_per_rank import BusiestRows, busiest_rows, once_per_rank, part_once
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.layouts.placement import Layout, Mesh, Shard
from autopar.layouts.redistribution import RedistributionStep, Shape
from autopar.ops.attention_blocks import Band, ring_offsets, ring_runs
from autopar.planner.problem.expert_exchanges import Message
from autopar.planner.problem.factorisation import shape_of, value_of
from autopar.planner.problem.strategies import LayoutSet, Strategies, local_fraction
from autopar.planner.routes.priced_routes import routes_of
from autopar.planner.routes.route_table import PricedStep
from autopar.planner.solver import FORBIDDEN
from autopar.plans.expert_hops import hops_of
from autopar.rules.engine import tensor_operands
from autopar.rules.rule import PAIR, RingTraffic, Rule

Floats = NDArray[np.float64]

TIE_BREAK_SECONDS = 1e-8
"""Added where the placements of all axes change, and half of it where all replicate an operator: among plans of equal
cost the still one wins. Far below any real kernel (a launch takes 1e-6 s)."""


RING_LAUNCHES = 2
"""Kernels of a step of a ring beside attention, at least: what joins, and what packs or rounds."""


def tie_breaks(mesh: Mesh) -> Floats:
    """(axes,) the part of each axis in `TIE_BREAK_SECONDS`, by the logarithm of its size: an axis of 8 counts as much
    as axes of 2 and 4 together, so that no plan costs more on a finer mesh."""
    logarithms = np.log(np.array(mesh.shape, dtype=np.float64))
    return np.asarray(TIE_BREAK_SECONDS * logarithms / (logarithms.sum() or 1.0))


def tensor_bytes(node: fx.Node, output: int = 0) -> int:
    """Global bytes of one output."""
    value = node.meta["val"]
    tensor = value[output] if isinstance(value, tuple | list) else value
    return int(math.prod(tensor.shape) * tensor.dtype.itemsize)


class Prices:
    """Seconds of strategies and redistributions for one (cluster, mesh)."""

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster = cluster
        self.mesh = mesh
        self.tie_breaks = tie_breaks(mesh)
        self._topology: dict[tuple[int, ...], GroupTopology] = {}
        self._collective: dict[tuple[CollectiveKind, tuple[int, ...], float], float] = {}
        self._routes = routes_of(mesh.shape)
        self._step_seconds: dict[float, list[float]] = {}
        self._route_seconds: dict[float, Floats] = {}

    def step_seconds(self, step: RedistributionStep, nbytes: float) -> float:
        """One step of a redistribution of a tensor of global `nbytes`, with its local copies."""
        return self._priced_step_seconds(PricedStep.of(step), nbytes)

    def _priced_step_seconds(self, step: PricedStep, nbytes: float) -> float:
        buffer = nbytes / self._ranks(_axes(step.cutting))
        if step.kind == "slice":
            return float(copy_seconds(self.cluster.device, buffer))
        seconds = self.collective_seconds(step.kind, _axes(step.axes), buffer)
        if step.is_transposing:
            seconds += float(copy_seconds(self.cluster.device, buffer, transposing=True))
        return seconds

    def collective_seconds(self, kind: CollectiveKind, axes: tuple[int, ...], nbytes: float) -> float:
        """One collective over `axes` with a full logical buffer of `nbytes`."""
        key = (kind, axes, nbytes)
        if key not in self._collective:
            topology = self._topology.get(axes)
            if topology is None:
                topology = self._topology[axes] = GroupTopology.of(self.cluster, self.mesh.shape, axes)
            self._collective[key] = float(collective_seconds(kind, nbytes, topology, self.cluster))
        return self._collective[key]

    def redistribution_seconds(self, shape: Shape, nbytes: float, source: Layout, target: Layout) -> float:
        """One entry of `redistribution_table`."""
        return float(self.redistribution_table(shape, nbytes, (source,), (target,))[0, 0])

    def redistribution_table(
        self, shape: Shape, nbytes: float, sources: Sequence[Layout], targets: Sequence[Layout | None]
    ) -> Floats:
        """(sources, targets) seconds of all steps between two layouts of a tensor of global `nbytes`.

        FORBIDDEN where nothing leads there, and for a target of None (not expressible behind a view).
        """
        table = np.full((len(sources), len(targets)), FORBIDDEN)
        if all(target is None for target in targets):
            return table
        columns = [j for j, target in enumerate(targets) if target is not None]
        routes = self._routes.table(shape, sources, [target for target in targets if target is not None])
        table[:, columns] = self._seconds_of_routes(nbytes)[routes]
        return table

    def _seconds_of_routes(self, nbytes: float) -> Floats:
        """(routes,) seconds of each for a tensor of global `nbytes`."""
        found = self._routes.found
        known = self._route_seconds.get(nbytes, np.empty(0))
        if len(known) < len(found):
            steps = self._seconds_of_steps(nbytes)
            new = found.seconds(len(known), steps, self.tie_breaks, FORBIDDEN)
            known = self._route_seconds[nbytes] = np.append(known, new)
        return known

    def _seconds_of_steps(self, nbytes: float) -> Floats:
        """(steps of the table of routes,) seconds of each for a tensor of global `nbytes`."""
        known = self._step_seconds.setdefault(nbytes, [])
        known.extend(self._priced_step_seconds(step, nbytes) for step in self._routes.found.steps[len(known) :])
        return np.array(known, np.float64)

    def operator_costs(
        self,
        node: fx.Node,
        rule: Rule,
        strategies: Strategies,
        traffic: Traffic,
        leads_kernel: bool,
        kernel_share: float = 1.0,
        kernel_rows: RowSizes | None = None,
        runs_as: object = None,
        exchanges: Sequence[Message] = (),
    ) -> Floats:
        """(strategies,) seconds of one operator on the fullest rank, without redistributing its operands.

        kernel_share: part of its kernel's bytes that the operator moves; kernel_rows: the rows of its kernel, where it
        has none of its own; runs_as: the operator that is called, other than that of the node; exchanges: what travels
        over axes that split rows and experts alike.
        """
        device = self.cluster.device
        target = runs_as or node.target
        kind = operator_kind(target)
        flops = rule.flops
        if kind == "memory":
            flops = max(
                (math.prod(shape_of(node, o)) for o, t in enumerate(rule.outputs) if t is not None), default=0
            ) * element_flops(device, base_name(target))
        sizes = self._sizes(node, base_name(target), rule, strategies)
        seconds = operator_seconds(
            device,
            flops=flops_of(sizes) if _has_own_keys(sizes) else flops * strategies.fraction,
            bytes_moved=self._bytes_moved(node, strategies, traffic),
            dtype=dtype_name(node),
            kind=kind,
            kernels=1 if leads_kernel else 0,
            operator=curve_name(target),
            sizes=sizes or kernel_rows,
            share=kernel_share,
        )
        rings = self._rings(rule, strategies, np.broadcast_to(seconds, (len(strategies),)))
        seconds = seconds + rings + self._synchronisation(rule, strategies) + self._edges(node, rule, strategies)
        if rule.pairs:
            busiest = [hops[-1].computed for hops in self._busiest(node, rule, strategies)]
            seconds = seconds * np.array(busiest)
            seconds = sum(self.exchanged(node, rule, strategies, exchanges), start=seconds)
        is_replicated = np.array([[name is None for name in axes] for axes in strategies.axes])
        return np.asarray(seconds + 0.5 * (is_replicated @ self.tie_breaks), dtype=np.float64)

    def fractions(self, layouts: LayoutSet, shape: Sequence[int]) -> Floats:
        """(strategies,) part of a tensor that a rank holds."""
        return np.array([local_fraction(layout, shape, self.mesh) for layout in layouts.distinct])[layouts.index]

    def _sizes(self, node: fx.Node, name: str, rule: Rule, strategies: Strategies) -> Sizes | None:
        """The sizes of an operator on the fullest rank under every strategy, where its price asks for them. What goes
        around a ring is whole in the end: the operands behind the query."""
        asks = self.cluster.device.curves is not None or operator_kind(name) == "attention"
        asks = asks or name in (*FLOAT8_PRODUCTS, *TILED_MLPS)
        if not asks or not has_sizes(name) or strategies.outputs[0] is None:
            return None
        shapes = [shape_of(*value_of(operand)) for operand in tensor_operands(node)]
        operands = [self.fractions(*pair) for pair in zip(strategies.inputs, shapes, strict=True)]
        if rule.ring_traffic:
            ranks = np.array([self._ranks(_chosen(axes, rule.ring_traffic)) for axes in strategies.axes])
            first = 2 if "backward" in name else 1
            operands[first : first + 2] = [part * ranks for part in operands[first : first + 2]]
        parts = Parts(
            operands=operands,
            result=self.fractions(strategies.outputs[0], shape_of(node)),
            work=strategies.fraction,
        )
        sizes = sizes_of(name, shapes, shape_of(node), parts, is_causal(node))
        if not isinstance(sizes, AttentionSizes):
            return sizes
        if (window := window_of(node)) is not None:
            band, kind = Band.of(sizes.causal, window), self.cluster.device.kind
            seen = keys_in_window(np.broadcast_to(sizes.queries, len(strategies)), sizes.keys, band, kind)
            return replace(sizes, keys=seen, causal=False)
        turned = np.array(list(map(in_zigzag, strategies.inputs[0].distinct)))[strategies.inputs[0].index]
        if sizes.causal and turned.any():
            balanced = keys_in_zigzag(sizes.queries, sizes.keys, self.cluster.device.kind)
            sizes = replace(sizes, keys=np.where(turned, balanced, sizes.keys))
        return sizes

    def _bytes_moved(self, node: fx.Node, strategies: Strategies, traffic: Traffic) -> Floats:
        operands = tensor_operands(node)

        def read(operand: fx.Node) -> Floats:
            if operand not in operands:
                return np.zeros(len(strategies))
            fractions = self.fractions(strategies.inputs[operands.index(operand)], shape_of(*value_of(operand)))
            return tensor_bytes(operand) * fractions

        def written(output: int) -> Floats:
            layouts = strategies.outputs[output] if output < len(strategies.outputs) else None
            if layouts is None:
                return np.zeros(len(strategies))
            return tensor_bytes(node, output) * self.fractions(layouts, shape_of(node, output))

        return sum(bytes_moved(node, traffic, read, written), start=np.zeros(len(strategies)))

    def ring_hops(self, traffic: RingTraffic, name: str, axes: Sequence[str | None], turned: bool) -> int:
        """Hops of a ring over the axes that chose `name`, without the one home. turned: it lies in zigzag order."""
        ranks = self._ranks(_chosen(axes, {name}))
        if traffic.band is None:
            return ranks - 1
        return len(ring_offsets(ring_runs(traffic.length, ranks, turned), traffic.band)) - 1

    def ring_seconds(
        self, traffic: RingTraffic, name: str, axes: Sequence[str | None], seconds: float, turned: bool = False
    ) -> float:
        """What a ring over the axes that chose `name` adds to the computation of its rank, of `seconds`: hops that take
        longer than what is computed beside them, the last one home, and joining what was found for every block. What
        a hop takes of the processor (`Cluster.collective_host_seconds`) nothing hides."""
        own, hops = _chosen(axes, {name}), self.ring_hops(traffic, name, axes, turned)
        cut = self._ranks(_chosen(axes, traffic.names))
        hop = self.collective_seconds("neighbours", own, traffic.nbytes / cut)
        home = self.collective_seconds("neighbours", own, traffic.home / cut) if traffic.home else 0.0
        device, joined = self.cluster.device, traffic.joined / self._ranks(_chosen(axes, traffic.joined_names))
        joining = joined / device.memory_bytes_per_second + RING_LAUNCHES * device.launch_seconds
        host = sum(min(way, self.cluster.collective_host_seconds) for way in (hop, home))
        return hops * (max(host, hop + home - seconds / (hops + 1)) + joining) + home

    def ring_part(
        self, traffic: RingTraffic, name: str, axes: Sequence[str | None], total: float, turned: bool = False
    ) -> float:
        """`ring_seconds` as a part of what it and the computation take together."""
        hops = self.ring_hops(traffic, name, axes, turned)
        beside = self.ring_seconds(traffic, name, axes, math.inf, turned)  # all hops hidden
        exposed = self.ring_seconds(traffic, name, axes, 0.0, turned)
        hides = exposed - beside <= (total - beside) * hops / (hops + 1)
        return beside if hides else total - (hops + 1) * (total - exposed)

    def _rings(self, rule: Rule, strategies: Strategies, seconds: Floats) -> Floats:
        added = np.zeros(len(strategies))
        for name, traffic in rule.ring_traffic.items():
            for strategy, axes in enumerate(strategies.axes):
                if name in axes:
                    turned = in_zigzag(strategies.inputs[0].distinct[int(strategies.inputs[0].index[strategy])])
                    added[strategy] += self.ring_seconds(traffic, name, axes, float(seconds[strategy]), turned)
        return added

    def _synchronisation(self, rule: Rule, strategies: Strategies) -> Floats:
        if not rule.synchronised_bytes:
            return np.zeros(len(strategies))
        costs = []
        for axes in strategies.axes:
            synchronised: dict[str, list[int]] = {}
            for axis, name in enumerate(axes):
                if name in rule.synchronised_bytes:
                    synchronised.setdefault(str(name), []).append(axis)
            costs.append(
                sum(
                    self.collective_seconds("all_reduce", tuple(found), rule.synchronised_bytes[name])
                    for name, found in synchronised.items()
                )
            )
        return np.array(costs, dtype=np.float64)

    def _edges(self, node: fx.Node, rule: Rule, strategies: Strategies) -> Floats:
        """(strategies,) seconds of exchanging the edges of blocks: other splits of the tensor shorten its rows."""
        seconds = np.zeros(len(strategies))
        operands = tensor_operands(node)
        for name, nbytes in rule.exchanged_bytes.items():
            index = max(i for i, dims in enumerate(rule.inputs) if any(name in dim for dim in dims))
            fractions = self.fractions(strategies.inputs[index], shape_of(*value_of(operands[index])))
            for strategy, axes in enumerate(strategies.axes):
                own = tuple(axis for axis, chosen in enumerate(axes) if chosen == name)
                if own and nbytes:
                    row_bytes = round(nbytes * float(fractions[strategy]) * self._ranks(own))
                    seconds[strategy] += self.collective_seconds("neighbours", own, row_bytes)
        return seconds

    def _busiest(self, node: fx.Node, rule: Rule, strategies: Strategies) -> list[list[BusiestRows]]:
        """Per strategy and hop of its rows, how many times the rows of the mean rank the busiest one has behind the
        hop, and receives from all ranks for experts of its own. Where rows do not travel, one for what it computes."""
        (pair,) = rule.pairs
        rows, experts = pair.split(PAIR)
        shares, own_rows = load_of(node, rule.sizes[experts]), self._row_parts(node, strategies) * rule.sizes[rows]
        found, capacity = [], capacity_of(node)
        for axes, own in zip(strategies.axes, own_rows, strict=True):
            ranks, group = self._ranks(_chosen(axes, {pair, experts})), self._ranks(_chosen(axes, {pair}))
            if capacity is not None and group > 1:
                each, blocks = places_per_expert(round(own), len(shares), capacity), -(-len(shares) // ranks)
                capped = ranks * blocks * each / own
                found.append([BusiestRows(capped, capped, capped)])
                continue
            replicated = replicated_of(node) if group > 1 else ()
            hops = []
            for behind in self._ranks_behind_hops(_chosen(axes, {pair})):
                among = behind * ranks // group
                busiest = busiest_rows(shares, replicated, among, round(own * behind))
                hops.append(BusiestRows(*(among * part for part in busiest)))
            found.append(hops)
        return found

    def _ranks_behind_hops(self, axes: tuple[int, ...]) -> list[int]:
        """Of how many ranks what is there behind every hop over these axes has come."""
        return [self._ranks(axes[: axes.index(hop[-1]) + 1]) if hop else 1 for hop in self._hops(axes)]

    def _hops(self, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The axes of every hop of rows that travel over these axes."""
        return hops_of(axes, [self.mesh.axis_names[axis] for axis in axes])

    def _row_parts(self, node: fx.Node, strategies: Strategies) -> Floats:
        """(strategies,) the part of the rows of a product of experts that a rank holds before they travel."""
        return self.fractions(strategies.inputs[-1], shape_of(*value_of(tensor_operands(node)[-1])))

    def exchanged(
        self, node: fx.Node, rule: Rule, strategies: Strategies, exchanges: Sequence[Message]
    ) -> Iterator[Floats]:
        """Per message (strategies,) seconds on the busiest rank, where rows travel to their experts or back, with those
        of putting in order what came, and where replicated experts or their gradients are added up."""
        if not exchanges or not rule.pairs:
            return
        busiest, names = self._busiest(node, rule, strategies), {*rule.pairs, *rule.pairs[0].split(PAIR)[1:]}
        for message in exchanges:
            seconds, parts = np.zeros(len(strategies)), self._exchanged_part(node, strategies, message)
            for strategy, axes in enumerate(strategies.axes):
                if not (own := _chosen(axes, rule.pairs)):
                    continue
                nbytes = message.nbytes * float(parts[strategy])
                if message.collective == "all_reduce":
                    nbytes *= self._ranks(_chosen(axes, names))
                    seconds[strategy] = self.collective_seconds("all_reduce", own, nbytes)
                    continue
                once = self._once_per_rank(node, rule, axes, message.each)
                if message.once in (None, once is not None):
                    seconds[strategy] = self._sent(message, nbytes, self._hops(own), busiest[strategy], once)
            yield seconds

    def _sent(
        self,
        message: Message,
        nbytes: float,
        hops: Sequence[tuple[int, ...]],
        busiest: Sequence[BusiestRows],
        once: Sequence[float] | None,
    ) -> float:
        """Seconds of a message of a rank over all hops, what came in one put in order for the next."""
        seconds = 0.0
        for hop, axes in enumerate(hops):
            received, came = nbytes * busiest[hop].received, nbytes * busiest[hop].computed
            if once is not None and message.tokens:
                received *= once[hop] + message.places / message.nbytes
                came *= 1.0 if hop + 1 == len(hops) else once[hop + 1]
            seconds += self.collective_seconds("all_to_all", axes, received)
            seconds += float(copy_seconds(self.cluster.device, came))
        return seconds

    def _once_per_rank(self, node: fx.Node, rule: Rule, axes: Sequence[str | None], each: int) -> list[float] | None:
        """Per hop how many tokens travel over it, as a part of a product's rows, of `each` to a token; None where rows
        do."""
        experts, own = rule.pairs[0].split(PAIR)[1], _chosen(axes, rule.pairs)
        others = self._ranks(_chosen(axes, {experts}))
        shares, replicated = load_of(node, rule.sizes[experts]), replicated_of(node)
        ranks = [others * behind for behind in self._ranks_behind_hops(own)]
        if once_per_rank(shares, replicated, ranks[0], each) is None:
            return None
        return [part_once(shares, replicated, one, each) for one in ranks]

    def _exchanged_part(self, node: fx.Node, strategies: Strategies, message: Message) -> Floats:
        """(strategies,) the part of a message that a rank sends."""
        operands, result = tensor_operands(node), strategies.outputs[0]
        if message.cut_by is None:
            return np.ones(len(strategies))
        if message.cut_by < 0:
            assert result is not None
            return self.fractions(result, shape_of(node))
        operand = operands[message.cut_by]
        return self.fractions(strategies.inputs[message.cut_by], shape_of(*value_of(operand)))

    def _ranks(self, axes: Sequence[int]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


def in_zigzag(layout: Layout | None) -> bool:
    """Whether a dim lies in zigzag order."""
    return layout is not None and any(isinstance(placed, Shard) and placed.zigzag for placed in layout)


def _has_own_keys(sizes: Sizes | None) -> TypeGuard[AttentionSizes]:
    """Whether attention sees other numbers of keys under some strategies."""
    return isinstance(sizes, AttentionSizes) and np.ndim(sizes.keys) > 0


def _chosen(axes: Sequence[str | None], names: Container[str | None]) -> tuple[int, ...]:
    """The axes that chose one of the names."""
    return tuple(axis for axis, chosen in enumerate(axes) if chosen is not None and chosen in names)


def _axes(bits: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(bits.bit_length()) if bits >> axis & 1)

"""Label sets: the labels that a class of slots has on one mesh, what they cost, and the layouts that they offer and
want.

Operators choose among their strategies, parameters among (stored, used), data among layouts; a shared copy takes any
layout that its producer makes or one of its readers wants.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.graphs.operator_names import operator_kind
from autopar.hardware.devices import has_units
from autopar.layouts.placement import Layout, Mesh, local_shape, replicated
from autopar.planner.problem.axis_presets import allowed_choices, allowed_labels, orders_offered
from autopar.planner.problem.equivalence import Implementation, LeafEquivalence, OperatorEquivalence
from autopar.planner.problem.factorisation import shape_of, value_of
from autopar.planner.problem.leaf_layouts import StateBytes, parameter_costs, parameter_labels, storable_layouts
from autopar.planner.problem.prices import TIE_BREAK_SECONDS, Floats, Prices
from autopar.planner.problem.redistribution_tables import Tables, Targets
from autopar.planner.problem.skeleton import Skeleton, Slot, SlotLink
from autopar.planner.problem.slot_classes import Classes
from autopar.planner.problem.strategies import MOST_CHANGES, LayoutSet, Strategies, enumerate_strategies, joined
from autopar.plans.plan_value import ParameterPlan
from autopar.request.constraints import Constraints
from autopar.request.mesh_axes import CONTEXT_AXES
from autopar.rules.alternatives import Alternative, Shape
from autopar.rules.engine import tensor_operands

ATTENTION_HEADS = frozenset({"h", "g"})
"""Names of heads in the rules of attention."""
LABEL_LOOKUPS = ("masked_gather", "masked_scatter")
"""Implementations by which a loss finds the logit of a label."""


@dataclass(frozen=True, slots=True, eq=False)
class LabelSet:
    """The labels of one class. offered: per output, what readers find; wanted: per port, what the links into it must
    bring. costs: (labels,) seconds. strategies: of operators; labels: of parameters."""

    offered: tuple[LayoutSet | None, ...]
    wanted: tuple[LayoutSet, ...]
    costs: Floats
    strategies: Strategies | None = None
    labels: tuple[ParameterPlan, ...] = ()


class LabelSets:
    """The label sets of one program on one mesh, and what a reader of the plan should know about them (`notes`)."""

    def __init__(
        self,
        skeleton: Skeleton,
        classes: Classes,
        mesh: Mesh,
        prices: Prices,
        constraints: Constraints,
        state_bytes: Mapping[str, StateBytes],
        freed: Mapping[fx.Node, tuple[int, ...]],
        named: Mapping[fx.Node, str],
        offered: frozenset[str],
    ) -> None:
        self.named, self.names_offered = named, offered
        self.skeleton, self.classes, self.mesh, self.prices = skeleton, classes, mesh, prices
        self.constraints, self.state_bytes, self.freed = constraints, state_bytes, freed
        self.tables = Tables(skeleton, mesh, prices)
        self.notes: list[str] = []
        self.label_sets: list[LabelSet] = []
        self._strategies: dict[Hashable, Strategies] = {}
        self._joined: dict[Hashable, Strategies] = {}
        self._fitted: dict[Hashable, Strategies] = {}
        self._labels: dict[Hashable, tuple[list[ParameterPlan], LayoutSet, LayoutSet]] = {}
        self._unions: dict[Hashable, LayoutSet] = {}
        self._zeros: dict[int, Floats] = {}
        for first in classes.slots:
            self.label_sets.append(self._with_tolls(skeleton.slots[first], self._label_set(first)))
        self._note_what_is_left_out()

    def offered(self, slot: int, output: int) -> LayoutSet:
        """What readers of an output find."""
        layouts = self.label_sets[self.classes.of_slot[slot]].offered[output]
        assert layouts is not None, "only tensors are read"
        return layouts

    def wanted(self, slot: int, port: int) -> LayoutSet:
        """What a link into a port must bring."""
        return self.label_sets[self.classes.of_slot[slot]].wanted[port]

    def table(self, link: SlotLink) -> Floats:
        """(labels of the source, labels of the target) seconds of the redistribution that a link needs."""
        freed = self.freed.get(self.skeleton.slots[link.source].node, ())
        source, target = self.offered(link.source, link.output), self.wanted(link.target, link.port)
        return self.tables.table(link.tensor, source, target, link.views, freed)

    def _note_what_is_left_out(self) -> None:
        left_out = sum(strategies.left_out for strategies in self._strategies.values())
        if left_out:
            kept = sum(map(len, self._strategies.values()))
            self.notes.append(
                f"{len(self.mesh.shape)} axes: {left_out} of {left_out + kept} strategies are left out, which change "
                f"their choice more than {MOST_CHANGES} times from axis to axis; stored layouts likewise"
            )

    def _label_set(self, index: int) -> LabelSet:
        slot = self.skeleton.slots[index]
        if slot.kind == "copy":
            return self._copy(index)
        equivalence = self.skeleton.equivalences[slot.equivalence]
        if isinstance(equivalence, OperatorEquivalence):
            return self._operator(slot, equivalence)
        return self._parameter(slot, equivalence) if slot.kind == "parameter" else self._data(equivalence)

    def _with_tolls(self, slot: Slot, label_set: LabelSet) -> LabelSet:
        """What the loss and mutated buffers cost to be replicated in the end."""
        whole = LayoutSet((replicated(len(self.mesh.shape)),), np.zeros(1, np.int64))
        costs = label_set.costs
        for output, tensor in slot.tolls:
            layouts = label_set.offered[output]
            assert layouts is not None, "only tensors are returned"
            costs = costs + self.tables.table(tensor, layouts, whole)[:, 0]
        return (
            label_set
            if costs is label_set.costs
            else LabelSet(label_set.offered, label_set.wanted, costs, label_set.strategies, label_set.labels)
        )

    def _operator(self, slot: Slot, equivalence: OperatorEquivalence) -> LabelSet:
        """The strategies of all implementations that are offered, one behind the other."""
        offered = self._implementations(slot, equivalence)
        found = [self._strategies_of(slot, equivalence, one) for one in offered]
        free = len(offered) > 1  # what is named alone runs as it can
        fitting = [self._fitting(equivalence.node, *pair, free) for pair in zip(offered, found, strict=True)]
        if any(map(len, fitting)):
            offered = [one for one, strategies in zip(offered, fitting, strict=True) if len(strategies)]
            found = [strategies for strategies in fitting if len(strategies)]
        costs = [
            self.prices.operator_costs(
                equivalence.node,
                one.rule,
                strategies,
                equivalence.traffic,
                equivalence.leads_kernel,
                equivalence.kernel_share,
                equivalence.kernel_rows,
                runs_as=one.target,
                exchanges=equivalence.exchanges,
            )
            for one, strategies in zip(offered, found, strict=True)
        ]
        key = tuple(map(id, found)), tuple(one.name for one in offered)  # `_strategies` keeps them alive
        if key not in self._joined:
            self._joined[key] = joined({one.name: own for one, own in zip(offered, found, strict=True)})
        strategies = self._joined[key]
        return LabelSet(strategies.outputs, strategies.inputs, np.concatenate(costs), strategies=strategies)

    def _implementations(self, slot: Slot, equivalence: OperatorEquivalence) -> list[Implementation]:
        """By which an operator may run: the one that the user names, else all that question and device offer."""
        named = self.named.get(slot.node)
        return [
            one
            for one in equivalence.implementations
            if (named == one.name if named is not None else self._is_offered(one.alternative))
        ]

    def _fitting(self, node: fx.Node, one: Implementation, strategies: Strategies, free: bool) -> Strategies:
        """The strategies for which an implementation is there and, where another may be taken (`free`), whose blocks
        it computes as they are on every rank."""
        alternative = one.alternative
        if alternative is None or (alternative.fits is None and alternative.splits is None):
            return strategies
        key = (one.family, id(strategies), free)  # `_strategies` keeps them alive
        if key not in self._fitted:
            rows = np.arange(len(strategies))
            if alternative.splits is not None:
                split = (alternative.splits in axes for axes in strategies.axes)
                apart = () if free else self._indivisible_axes(one.rule.sizes.get(alternative.splits, 1))
                whole = (bool(apart) and all(axes[axis] is None for axis in apart) for axes in strategies.axes)
                rows = rows[[any(pair) for pair in zip(split, whole, strict=True)]]
            if alternative.fits is not None and free:
                rows = rows[self._fits(node, alternative.fits, strategies.take(rows))]
            self._fitted[key] = strategies.take(rows)
        return self._fitted[key]

    def _indivisible_axes(self, length: int) -> tuple[int, ...]:
        """The axes of context parallelism, where none of them divides a sequence: then it may stay whole."""
        sizes = zip(self.mesh.axis_names, self.mesh.shape, strict=True)
        axes = [(axis, size) for axis, (name, size) in enumerate(sizes) if name in CONTEXT_AXES and size > 1]
        return tuple(axis for axis, _ in axes) if all(length % size for _, size in axes) else ()

    def _fits(self, node: fx.Node, fits: Callable[[Sequence[Shape]], bool], strategies: Strategies) -> list[bool]:
        """(strategies,) whether every rank has a block of one size of each operand, and these fit."""
        shapes = [shape_of(*value_of(operand)) for operand in tensor_operands(node)]
        blocks = [
            [_even_block(shape, layout, self.mesh) for layout in layouts.distinct]
            for shape, layouts in zip(shapes, strategies.inputs, strict=True)
        ]
        found = []
        for row in range(len(strategies)):
            own = [of[layouts.index[row]] for of, layouts in zip(blocks, strategies.inputs, strict=True)]
            even = [block for block in own if block is not None]
            found.append(len(even) == len(own) and fits(even))
        return found

    def _is_offered(self, alternative: Alternative | None) -> bool:
        if alternative is None:
            return True
        has = alternative.unit is None or has_units(self.prices.cluster.device, alternative.unit)
        return has and alternative.name in self.names_offered

    def _strategies_of(self, slot: Slot, equivalence: OperatorEquivalence, one: Implementation) -> Strategies:
        """freed: axes on which the user's constraints take the place of what their names ask."""
        freed = self.freed.get(slot.node, ())
        if (one.family, freed) not in self._strategies:
            lookups = frozenset(n for n, how in one.rule.implementations.items() if how in LABEL_LOOKUPS)
            choices = orders_offered(one.choices, self.mesh, self.skeleton.sequences)
            attends, cp = operator_kind(one.target) == "attention", self.constraints.cp
            allowed = [
                choices
                if axis in freed
                else allowed_choices(
                    choices,
                    axis_name,
                    size,
                    batch=self.skeleton.batch,
                    sequence=None if attends and cp == "ulysses" else self.skeleton.sequence,
                    heavy=equivalence.heavy,
                    spread=self.constraints.no_replicated_compute,
                    lookups=lookups,
                    heads=ATTENTION_HEADS if attends and cp in (None, "ulysses") else frozenset(),
                    experts=self.constraints.ep,
                )
                for axis, (axis_name, size) in enumerate(zip(self.mesh.axis_names, self.mesh.shape, strict=True))
            ]
            strategies = enumerate_strategies(equivalence.node, allowed, self.mesh)
            if strategies is None:
                self.notes.append(f"{slot.name}: its dims do not divide as the axes ask; left free")
                strategies = enumerate_strategies(
                    equivalence.node, [choices] * len(self.mesh.shape), self.mesh
                )
                assert strategies is not None, "replicating is always possible"
            self._strategies[one.family, freed] = strategies
        return self._strategies[one.family, freed]

    def _parameter(self, slot: Slot, equivalence: LeafEquivalence) -> LabelSet:
        shape = shape_of(equivalence.node)
        key = (equivalence.choices, shape)
        if key not in self._labels:
            every = parameter_labels(equivalence.choices, shape, self.mesh)
            self._labels[key] = (
                every,
                LayoutSet.of([label.stored for label in every], shape, self.mesh),
                LayoutSet.of([label.used for label in every], shape, self.mesh),
            )
        every, stored, used = self._labels[key]
        allowed = allowed_labels(
            every, slot.name, self.mesh, self.constraints, equivalence.is_matrix, self.freed.get(slot.node, ())
        )
        if equivalence.is_master:
            allowed = [i for i in allowed if not every[i].keep_gathered] or allowed
        rows = np.array(allowed, dtype=np.int64)
        stored, used = stored.take(rows), used.take(rows)
        itemsize = equivalence.node.meta["val"].dtype.itemsize
        costs = parameter_costs(stored, used, shape, itemsize, self.state_bytes[slot.name], self.prices)
        return LabelSet((used,), (stored,), costs, labels=tuple(every[i] for i in allowed))

    def _data(self, equivalence: LeafEquivalence) -> LabelSet:
        """A batch input: every rank can take its part for free; an output: any layout; a constant: replicated."""
        whole = replicated(len(self.mesh.shape))
        found = (
            storable_layouts(
                orders_offered(equivalence.choices, self.mesh, self.skeleton.sequences),
                shape_of(equivalence.node),
                self.mesh,
            )
            if len(equivalence.choices) > 1
            else [whole]
        )
        layouts = LayoutSet(tuple(found), np.arange(len(found)))
        costs = np.array([TIE_BREAK_SECONDS * (equivalence.prefers_whole and layout != whole) for layout in found])
        return LabelSet((layouts,), (layouts,), costs)

    def _copy(self, index: int) -> LabelSet:
        """Any layout that the producer makes or that a reader wants."""
        into, readers = self.skeleton.copies_of[index]
        label_sets: list[Targets] = [self.offered(into.source, into.output).distinct]
        for link in readers:
            label_sets.append(self.tables.before_views(link.views, self.wanted(link.target, link.port).distinct))
        key = tuple(dict.fromkeys(map(id, label_sets)))  # `tables` keeps one tuple per label set alive
        if key not in self._unions:
            union: dict[Layout, None] = {}
            for label_set in label_sets:
                union.update({layout: None for layout in label_set if layout is not None})
            self._unions[key] = LayoutSet(tuple(union), np.arange(len(union)))
        layouts = self._unions[key]
        size = len(layouts.distinct)
        return LabelSet((layouts,), (layouts,), self._zeros.setdefault(size, np.zeros(size)))


def _even_block(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...] | None:
    """The block of every rank; None where ranks hold blocks of other sizes."""
    first, last = (local_shape(shape, layout, mesh, mesh.coordinate(rank)) for rank in (0, mesh.size - 1))
    return first if first == last else None

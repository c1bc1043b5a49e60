"""Memory of the host as a dimension of the search: what waits there between its uses is one more label of its operator.

    tanh#3, saved             512 MB from forward to backward
    tanh#3, saved on host     512 MB while it is made, and while backward reads it; 512 MB each way over the link
    up.weight                 itself, its gradient and the optimizer's state, always
    up.weight, on host        itself where an operator reads it; its bytes per phase, and its gradient's, over the link

Copies run beside computation, on a link of their own for each direction. A sum of seconds cannot say so, hence there
are two problems. In the one that hides them a copy costs `LIMITS.price_of_hidden_copies` of its seconds, and rows say
that a phase copies no more than its kernels have time for. In the other one copies stop the rank, and as many as memory
asks for may be chosen; what they hide behind is left to the simulator. The optimizer of a parameter on the host steps
there, at the rate of the host's memory. How much may lie there is a row of both: the devices of a node share it.

Left out, as neither memory nor the link would notice them: values below `LIMITS.least_on_host` of all of their kind
that could go.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autopar.cost_models.copy_costs import copy_rate, host_optimizer_seconds
from autopar.graphs.copy_nodes import Direction
from autopar.hardware.cluster import Cluster
from autopar.hardware.hosts import Host
from autopar.layouts.placement import Layout, Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.recomputation import ON_HOST, SAVED
from autopar.planner.one_mesh.restrict import narrowed
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.prices import Floats, tensor_bytes
from autopar.planner.problem.strategies import LayoutSet, local_fraction
from autopar.planner.solver import MemoryRow
from autopar.plans.plan_value import HOST
from autopar.request.offload import ACTIVATIONS, PARAMETERS

COPIES_AT_ONCE = 2
"""One is on the link while what the other brought is read."""
MEMORY_OF_HOST = "the memory of the host"
PHASES = ("forward", "backward")
Way = tuple[str, Direction]
"""A phase and a direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLabels:
    """Adds labels to the problem of one mesh. may_wait: of "activations" and "parameters" those that may; state_bytes:
    as of `MemoryModel`; count: micro-batches of a step; hidden: whether copies are priced as hidden, under rows."""

    cluster: Cluster
    mesh: Mesh
    state_bytes: Mapping[str, StateBytes]
    lifetimes: Lifetimes
    may_wait: Collection[str]
    count: int
    hidden: bool

    def added(self, built: Built, kernel_seconds: Mapping[str, float]) -> tuple[Built, tuple[MemoryRow, ...], float]:
        """The problem with recomputation and these labels, the rows of the link and of the host's memory, and bytes for
        `COPIES_AT_ONCE` of the largest copies. kernel_seconds: of each phase."""
        every = {index: self._moved(built, node, index) for node, index in self._candidates(built).items()}
        moved = noticed(every, [variable.kind == "parameter" for variable in built.variables])
        rows = {index: self._rows(built.variables[index]) for index in moved}
        wide = narrowed(built, rows, ())
        known: dict[tuple[int, ...], Floats] = {}
        variables = list(wide.variables)
        for index, each in moved.items():
            variables[index] = self._with_host(wide.variables[index], len(rows[index]), each, known)
        problem = replace(wide.problem, node_costs=tuple(variable.costs for variable in variables))
        links = tuple(self._link_rows(variables, moved, kernel_seconds)) if self.hidden else ()
        largest = max((float(np.max(nbytes)) for each in moved.values() for nbytes in each.values()), default=0.0)
        rows_beside = (*links, self._memory_row(variables, moved))
        return replace(wide, problem=problem, variables=variables), rows_beside, COPIES_AT_ONCE * largest

    def _candidates(self, built: Built) -> dict[fx.Node, int]:
        """What may wait on the host."""
        found: dict[fx.Node, int] = {}
        if PARAMETERS in self.may_wait:
            found |= {n: i for n, i in built.placeholders.items() if built.variables[i].kind == "parameter"}
        if ACTIVATIONS in self.may_wait:
            results = {id(node) for node in self.lifetimes.results.values()}
            found |= {
                node: index
                for node, index in built.operators.items()
                if node.meta["phase"] != "backward"
                and id(node) not in results
                and self._has_saved(built.variables[index])
                and self.lifetimes.saved_outputs(node)
            }
        return found

    @staticmethod
    def _has_saved(variable: Variable) -> bool:
        return variable.availability is not None and bool((variable.availability == SAVED).any())

    @staticmethod
    def _rows(variable: Variable) -> np.ndarray:
        """All labels, and behind them again those that are saved on the device."""
        every = np.arange(len(variable.costs))
        states = variable.availability
        return np.concatenate([every, every if states is None else every[states == SAVED]])

    def _moved(self, built: Built, node: fx.Node, index: int) -> dict[Way, Floats]:
        """Bytes over the link in a phase, of each label that is to have a second form."""
        variable = built.variables[index]
        if variable.kind == "parameter":
            return self._moved_of_parameter(node, variable)
        total = np.zeros(len(variable.costs))
        for output in self.lifetimes.saved_outputs(node):
            layouts = variable.layouts[output]
            if layouts is not None:
                total = total + self._local(layouts, shape_of(node, output), tensor_bytes(node, output))
        assert variable.availability is not None
        total = total[variable.availability == SAVED]
        return {("forward", "to_host"): total, ("backward", "from_host"): total}

    def _moved_of_parameter(self, node: fx.Node, variable: Variable) -> dict[Way, Floats]:
        """It comes in each phase that reads it, once where the gathered weight is kept; its gradient goes."""
        lifetimes, state = self.lifetimes, self.state_bytes[variable.name]
        assert variable.stored is not None
        share = self._fractions(variable.stored.distinct, shape_of(node))[variable.stored.index]
        own = share * tensor_bytes(node)
        kept = np.array([label.keep_gathered for label in variable.labels])
        found: dict[Way, Floats] = {}
        if (node, 0) in lifetimes.forward_readers:
            found["forward", "from_host"] = own
        if (node, 0) in lifetimes.backward_readers:
            found["backward", "from_host"] = np.where(kept, 0.0, own)
        if node in lifetimes.gradient_position and state.gradient:
            found["backward", "to_host"] = share * math.prod(shape_of(node)) * state.gradient
        return found or {("forward", "from_host"): own}

    def _with_host(
        self, variable: Variable, size: int, moved: Mapping[Way, Floats], known: dict[tuple[int, ...], Floats]
    ) -> Variable:
        """The variable, whose last labels are those on the host now, at their costs."""
        more = len(next(iter(moved.values())))
        key = (id(variable.costs), *(id(each) for each in moved.values()))
        if key not in known:
            extra = self._seconds(moved) + (self._step_seconds(variable, more) if variable.labels else 0.0)
            known[key] = variable.costs + _behind_zeros(extra, size)
        if variable.labels:
            on_host = [replace(label, stored_on=HOST) for label in variable.labels[-more:]]
            states = np.repeat([SAVED, ON_HOST], more)
            return replace(
                variable, costs=known[key], labels=(*variable.labels[:-more], *on_host), availability=states
            )
        assert variable.availability is not None
        states = variable.availability.copy()
        states[-more:] = ON_HOST
        return replace(variable, costs=known[key], availability=states)

    def _seconds(self, moved: Mapping[Way, Floats]) -> Floats:
        price = self.count * (LIMITS.price_of_hidden_copies if self.hidden else 1.0)
        return np.asarray(sum(price * nbytes / self._rate(way) for (_, way), nbytes in moved.items()))

    def _step_seconds(self, variable: Variable, more: int) -> Floats:
        """What the optimizer takes longer on the host, of the last labels."""
        state, stored = self.state_bytes[variable.name], variable.stored
        assert stored is not None
        elements = math.prod(shape_of(variable.node))
        share = self._fractions(stored.distinct, shape_of(variable.node))[stored.index[-more:]]
        held = share * elements
        there = host_optimizer_seconds(self._host, held * state.step_traffic, self.cluster.devices_per_node)
        return np.asarray(there - state.step_seconds(self.cluster.device, held))

    def _link_rows(
        self, variables: list[Variable], moved: Mapping[int, Mapping[Way, Floats]], kernel_seconds: Mapping[str, float]
    ) -> Iterator[MemoryRow]:
        """What each way of the link can move while the kernels of a phase run."""
        for phase in PHASES:
            for way in ("to_host", "from_host"):
                nbytes = {
                    index: _behind_zeros(each[phase, way], len(variables[index].costs))
                    for index, each in moved.items()
                    if (phase, way) in each
                }
                if nbytes:
                    yield MemoryRow(
                        name=f"the link to the host, {way} in {phase}",
                        bytes=nbytes,
                        budget_bytes=kernel_seconds[phase] * self._rate(way) * LIMITS.hidden_copies_share,
                        constant_bytes=0.0,
                    )

    def _memory_row(self, variables: list[Variable], moved: Mapping[int, Mapping[Way, Floats]]) -> MemoryRow:
        """What waits on the host, of every device of a node: saved values, parameters with gradient and state."""
        return MemoryRow(
            name=MEMORY_OF_HOST,
            bytes={
                index: _behind_zeros(self._held_there(variables[index], each), len(variables[index].costs))
                for index, each in moved.items()
            },
            budget_bytes=self._host.bytes_per_device(self.cluster.devices_per_node),
        )

    def _held_there(self, variable: Variable, moved: Mapping[Way, Floats]) -> Floats:
        if variable.kind != "parameter":
            return moved["forward", "to_host"]
        state, stored = self.state_bytes[variable.name], variable.stored
        assert stored is not None
        each = tensor_bytes(variable.node) + math.prod(shape_of(variable.node)) * (state.gradient + state.optimizer)
        more = len(next(iter(moved.values())))
        return self._fractions(stored.distinct, shape_of(variable.node))[stored.index[-more:]] * each

    def _rate(self, way: Direction) -> float:
        return copy_rate(self._host, way, self.cluster.devices_per_node)

    @property
    def _host(self) -> Host:
        assert self.cluster.host is not None
        return self.cluster.host

    def _local(self, layouts: LayoutSet, shape: tuple[int, ...], nbytes: float) -> Floats:
        return np.asarray(nbytes * self._fractions(layouts.distinct, shape)[layouts.index])

    def _fractions(self, layouts: Collection[Layout], shape: tuple[int, ...]) -> Floats:
        return np.array([local_fraction(layout, shape, self.mesh) for layout in layouts])


def noticed(
    moved: Mapping[int, Mapping[Way, Floats]], is_parameter: Sequence[bool]
) -> dict[int, Mapping[Way, Floats]]:
    """What memory and link would notice, among parameters and among saved values: beside the values of a long sequence
    every parameter is small, and all of them are not."""
    sizes = {index: float(np.max(sum(each.values()))) for index, each in moved.items()}
    total = dict.fromkeys((True, False), 0.0)
    for index, size in sizes.items():
        total[is_parameter[index]] += size
    return {
        index: each
        for index, each in moved.items()
        if sizes[index] >= LIMITS.least_on_host * total[is_parameter[index]]
    }


def _behind_zeros(values: Floats, size: int) -> Floats:
    """(size,): the values last."""
    return np.concatenate([np.zeros(size - len(values)), values])

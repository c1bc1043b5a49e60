"""Micro-batches: whether a step may run in parts of the batch, and its program for one part.

    micro = in_parts(whole, 2, at_batch)            raises NotSeparable with the reason

    n = sum(keep); loss = s / n    -->    n = sum(keep); loss = s / n_of_the_whole; return loss, n

Statistics of the whole batch become inputs of the part; the rest of its program is what was captured at its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

from torch import fx

from autopar._compat import Graph, LazyGraphModule
from autopar.capture.family import aligned
from autopar.errors import CaptureError, PlanMismatchError
from autopar.graphs.expert_capacity import with_expert_capacity
from autopar.graphs.expert_loads import with_expert_load
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.planner.batch.batch_flow import BatchFlow, Kind, NotSeparable
from autopar.planner.problem.factorisation import Factorisation, value_of
from autopar.program import Input, Joined, MicroProgram, Output, Program, batch_size


class Recapture(Protocol):
    """A captured program that can be had at another size of its batch: a model and its arguments, or what remembers
    them."""

    def at_batch(self, size: int) -> Program:
        """The program that the model computes for so many samples. Raises CaptureError where it does not run so."""


@dataclass(frozen=True, slots=True)
class RecaptureWithKernels:
    """A `Recapture` whose programs have operators of ours in the place of groups of these kinds (`with_kernels`), and
    experts with this load, some of them replicated, in this order, or this capacity."""

    recapture: Recapture
    kernels: tuple[str, ...]
    expert_load: Mapping[str, Sequence[float]] = field(default_factory=dict)
    replicated_experts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    expert_order: Mapping[str, Sequence[int]] = field(default_factory=dict)
    expert_capacity: float | None = None

    def at_batch(self, size: int) -> Program:
        """The program for so many samples."""
        program = with_kernels(self.recapture.at_batch(size), self.kernels)
        program = with_expert_load(program, self.expert_load, self.replicated_experts, self.expert_order)
        return with_expert_capacity(program, self.expert_capacity)


def micro_program(whole: Program, part: Program, count: int, factorisation: Factorisation) -> MicroProgram:
    """The step of `whole` as `count` runs of one program, made of `part`, the capture at a `count`-th of the batch.

    factorisation: of `whole`. Raises NotSeparable where the parts do not add up to the whole.
    """
    parts, flow = _flow(whole, part, count, factorisation)
    scales = {_name(node): float(_statistic_scale(flow, node, count)) for node in flow.statistics}
    return MicroProgram(
        program=_with_statistics(part, [parts[node] for node in flow.statistics]),
        whole=whole,
        count=count,
        loss_scale=float(flow.loss_scale),
        statistic_scales=scales,
        joined=_joined(whole, flow, count),
        draws=flow.draws,
    )


def flow_in_parts(whole: Program, count: int, recapture: Recapture, factorisation: Factorisation) -> BatchFlow:
    """How the values of a step depend on its samples, by a capture at a `count`-th of the batch. Raises NotSeparable.
    """
    return _flow(whole, _captured_part(whole, count, recapture), count, factorisation)[1]


def _flow(
    whole: Program, part: Program, count: int, factorisation: Factorisation
) -> tuple[Mapping[fx.Node, fx.Node], BatchFlow]:
    """The node of the part for every node of the whole, and the flow."""
    parts = aligned(whole, part)
    if parts is None:
        raise NotSeparable(f"at batch {batch_size(part)} the model computes another graph than at {batch_size(whole)}")
    try:
        return parts, BatchFlow(whole, parts, count, factorisation, average=True)
    except NotSeparable:
        return parts, BatchFlow(whole, parts, count, factorisation, average=False)


def in_parts(
    whole: Program, count: int, recapture: Recapture, factorisation: Factorisation | None = None
) -> MicroProgram:
    """`micro_program` with the capture at the smaller batch. Raises NotSeparable."""
    part = _captured_part(whole, count, recapture)
    return micro_program(whole, part, count, factorisation or Factorisation(whole))


def _captured_part(whole: Program, count: int, recapture: Recapture) -> Program:
    if whole.guards:
        raise NotSeparable(f"{whole.guards[0].place} reads a value of the whole batch (branches=)")
    size = batch_size(whole)
    if size is None:
        raise NotSeparable("the inputs have no common batch")
    if count < 1 or size % count:
        raise NotSeparable(f"a batch of {size} does not split into {count} equal micro-batches")
    try:
        return recapture.at_batch(size // count)
    except CaptureError as error:
        raise NotSeparable(f"the model does not run at batch {size // count}: {error}") from error


def planned_parts(
    whole: Program,
    count: int,
    recapture: Recapture,
    factorisation: Factorisation | None = None,
    kernels: tuple[str, ...] = (),
) -> MicroProgram:
    """`in_parts`, for the number and with the kernels that a plan says; factorisation: with the kernels. Raises
    PlanMismatchError where the model does not run so."""
    try:
        return in_parts(with_kernels(whole, kernels), count, RecaptureWithKernels(recapture, kernels), factorisation)
    except NotSeparable as reason:
        raise PlanMismatchError(
            f"the plan runs {count} micro-batches, but this model cannot: {reason}; plan again"
        ) from reason


def _name(node: fx.Node) -> str:
    return str(node.meta["operator"])


def _statistic_scale(flow: BatchFlow, node: fx.Node, count: int) -> Fraction:
    """sum over parts -> what the parts read: the average of the parts, or the value of the whole batch."""
    if flow.reads_average(node):
        return Fraction(1, count)
    return Fraction(count) ** (flow.flows[value_of(node)].degree - 1)


def _joined(whole: Program, flow: BatchFlow, count: int) -> dict[str, Joined]:
    found = {}
    for node, output in zip(whole.returned, whole.outputs, strict=True):
        if output.role not in ("loss", "output") or not isinstance(node, fx.Node):
            continue
        value = value_of(node)
        kind, degree = flow.flows[value].kind, flow.flows[value].degree
        if kind is Kind.SAMPLES:
            found[output.name] = Joined(dim=flow.batch_dim(value))
        elif kind is Kind.FIXED and degree == 0:
            found[output.name] = Joined()
        else:
            found[output.name] = Joined(scale=float(Fraction(count) ** (degree - 1)))
    return found


def _with_statistics(part: Program, statistics: list[fx.Node]) -> Program:
    """A copy of `part` that returns the statistics, and reads those of the whole batch as inputs.

    n = sum(keep); loss = s / n    -->    n = sum(keep); loss = s / n_of_the_whole; return ..., n
    """
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = list(graph.graph_copy(part.graph, copies))  # type: ignore[arg-type]
    inputs: list[Input] = list(part.inputs)
    for node in statistics:
        value = node.meta["val"]
        last = [copy for copy in graph.nodes if copy.op == "placeholder"][-1]
        with graph.inserting_after(last):
            known = graph.placeholder(f"statistic_{len(inputs)}")
        known.meta = {"val": value, "phase": "forward", "operator": _name(node)}
        inputs.append(Input(role="statistic", name=_name(node), shape=tuple(value.shape), dtype=value.dtype))
        for reader in list(copies[node].users):
            if not BatchFlow.stays_average(reader):
                reader.replace_input_with(copies[node], known)
    first = next((i for i, output in enumerate(part.outputs) if output.role == "gradient"), len(returned))
    extra = [Output(role="statistic", name=_name(node)) for node in statistics]
    graph.output((*returned[:first], *(copies[node] for node in statistics), *returned[first:]))
    return replace(
        part,
        graph_module=LazyGraphModule(part.graph_module, graph),
        inputs=tuple(inputs),
        outputs=(*part.outputs[:first], *extra, *part.outputs[first:]),
    )

"""Batch flow: how every value of a step depends on the samples of the batch, read off the rules.

    samples      carries the batch: sample i of the value depends on sample i of the inputs only
    averaged     contracted over the batch: the value of the whole is m^degree times the average over m micro-batches
    fixed        does not know the batch: equal for the whole and for every micro-batch

A sum over samples has degree 1, a mean degree 0. A number that the capture wrote as batch size has degree 1 as well:
`sum(x) / 512` is a mean where the program at half the batch divides by 256. Averages, and values of another degree than
0, pass through linear operators only, which is what makes micro-batches exact:

    mean: loss(whole) = 1/m * (loss_1 + ... + loss_m)        sum: loss(whole) = loss_1 + ... + loss_m

An average that depends on inputs alone (the number of labels that are not ignored) may be used in any way: it is a
*statistic*, computed on the whole batch beforehand and then fixed. The flow reads forward and backward alike, so that
hooks and custom gradients are held to the same rules. What does not fit raises `NotSeparable` with the reason.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

import torch
from torch import fx

from autopar._compat import tree_leaves
from autopar.layouts.placement import Partial, Replicate, Shard
from autopar.passes.random_operators import is_random
from autopar.planner.problem.axis_choices import choices_of
from autopar.planner.problem.factorisation import Factorisation, Value, shape_of, value_of
from autopar.planner.problem.graph_operators import is_operator
from autopar.planner.problem.strategies import AxisChoice
from autopar.program import Program
from autopar.rules.engine import is_view, rule_for, tensor_operands
from autopar.rules.rule import Rule

_aten = torch.ops.aten
_PRODUCTS: Mapping[object, int] = {_aten.mul.Tensor: 1, _aten.mul.Scalar: 1, _aten.div.Tensor: -1, _aten.div.Scalar: -1}
"""Operators by whose second operand a degree is added or taken away."""
_FILLS: Mapping[object, int] = {_aten.full.default: 1, _aten.scalar_tensor.default: 0}
"""Operators that write a number, and where it stands among their arguments."""
_BY_PLACE = (_aten.index.Tensor, _aten.index_put.default)
_MEANS = (_aten.mean.dim, _aten.mean.default)
_SHAPES = frozenset({"size", "shape", "sizes", "self_sizes", "input_sizes", "implicit", "bias_sizes", "N"})
"""Arguments that are shapes, and the samples N of a group norm: they follow the batch, and the shapes of the results
are compared anyway."""


class NotSeparable(Exception):
    """The step cannot run in micro-batches; the text says which operator and why."""


class Kind(Enum):
    """How a value depends on the batch; see the module docstring."""

    FIXED = "fixed"
    SAMPLES = "samples"
    AVERAGED = "averaged"


@dataclass(frozen=True, slots=True)
class Flow:
    """Kind and degree of one value, and whether it depends on inputs and constants only. counts: the value of a sample
    is its place in the batch, by which it may find itself in another tensor, and no more."""

    kind: Kind
    degree: int = 0
    data_only: bool = True
    counts: bool = False


_FIXED = Flow(Kind.FIXED)


class BatchFlow:
    """The flow of every value of `whole`, whose program for one of `count` micro-batches is `part`.

    parts: node of `whole` -> the same node of `part`. average: whether statistics enter as averages over the
    micro-batches, which keeps `sum / statistic` a mean, or as the values of the whole batch.
    """

    def __init__(
        self, whole: Program, parts: Mapping[fx.Node, fx.Node], count: int, factorisation: Factorisation, average: bool
    ) -> None:
        self._whole, self._parts, self._count, self._factorisation = whole, parts, count, factorisation
        self._average = average
        self._inputs = dict(zip(whole.placeholders, whole.inputs, strict=True))
        self._batch = self._batch_classes()
        self.flows: dict[Value, Flow] = {}
        self.statistics: dict[fx.Node, None] = {}
        """Averages over inputs alone that something else than a linear chain of such reads."""
        self.draws: dict[str, int] = {}
        """Operators that draw random numbers per sample, with the dim of their first output that holds the samples."""
        self.loss_degree = self._run()

    @property
    def loss_scale(self) -> Fraction:
        """What each micro-batch's loss counts in that of the whole."""
        return Fraction(self._count) ** (self.loss_degree - 1)

    # -- walking the graph

    def _run(self) -> int:
        nodes = list(self._whole.graph.nodes)
        forward = [n for n in nodes if n.op != "output" and n.meta.get("phase") != "backward"]
        for node in forward:
            self._visit(node)
        degree = self._loss_degree()
        degrees = self._scalar_degrees()
        for node in nodes:
            if node.op == "placeholder" and self._inputs[node].role == "tangent":
                self.flows[node, 0] = Flow(Kind.FIXED, 1 - degrees[self._inputs[node].name], data_only=False)
            elif node.op != "output" and node.meta.get("phase") == "backward":
                self._visit(node)
        _check_gradients(self._whole, self.flows)
        return degree

    def _visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.flows[node, 0] = self._input_flow(node)
        elif node.op == "get_attr":
            self.flows[node, 0] = _FIXED
        elif is_view(node):
            flow = self._flow_of(value_of(node.args[0]), node)  # type: ignore[arg-type]
            self._define(node, 0, flow)
        elif node.op == "call_function" and is_operator(node) and node.target is not operator.getitem:
            self._read_operator(node)

    def _input_flow(self, node: fx.Node) -> Flow:
        entry = self._inputs[node]
        if entry.role == "input" and entry.batch_dim is not None:
            return Flow(Kind.SAMPLES)
        if shape_of(node) != shape_of(self._parts[node]):
            raise NotSeparable(f"the shape of {entry.name} follows the batch")
        return Flow(Kind.FIXED, data_only=entry.role != "parameter")

    def _define(self, node: fx.Node, output: int, flow: Flow) -> None:
        """Keep the flow of a value; its shape must follow the batch exactly where it carries samples."""
        shape, other = shape_of(node, output), shape_of(self._parts[node], output)
        found = self._positions((node, output))
        varying = [dim for dim, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]
        follows = len(found) == 1 and varying == [found[0][0]] and shape[varying[0]] == self._count * other[varying[0]]
        if flow.kind is Kind.SAMPLES and not follows:
            raise _refused(node, "loses sight of the batch, or carries it twice")
        if flow.kind is not Kind.SAMPLES and (varying or found):
            raise _refused(node, "has a shape that follows the batch, but not its samples")
        self.flows[node, output] = flow

    def _positions(self, value: Value) -> list[tuple[int, int]]:
        """(dim, atom) of the batch among the dims of a value."""
        return [
            (dim, position)
            for dim in range(len(shape_of(*value)))
            for position in range(len(self._factorisation.atoms(value, dim)))
            if self._factorisation.atom_class(value, dim, position) in self._batch
        ]

    def batch_dim(self, value: Value) -> int:
        """The dim of a value that carries the samples, outermost in it."""
        return self._positions(value)[0][0]

    def batch_place(self, value: Value) -> tuple[int, int]:
        """(that dim, how many indices of it lie outside of the samples)."""
        dim, position = self._positions(value)[0]
        return dim, math.prod(self._factorisation.atoms(value, dim)[:position])

    def _batch_classes(self) -> set[object]:
        found: set[object] = set()
        for node, entry in self._inputs.items():
            if entry.role == "input" and entry.batch_dim is not None:
                self._size = entry.shape[entry.batch_dim]
                atoms = self._factorisation.atoms((node, 0), entry.batch_dim)
                if len(atoms) != 1:
                    raise NotSeparable(f"the model cuts the batch of {entry.name} into {atoms}")
                found.add(self._factorisation.atom_class((node, 0), entry.batch_dim))
        return found

    # -- operators

    def _read_operator(self, node: fx.Node) -> None:
        rule = rule_for(node)
        operands = tensor_operands(node)
        flows = [self._flow_of(value_of(operand), node) for operand in operands]
        outputs = _outputs(node)
        if self._counts_samples(node):
            self._define(node, 0, Flow(Kind.SAMPLES, counts=True))
            return
        if any(flow.counts for flow in flows):
            self._define(node, 0, self._found_by_place(node, operands, flows))
            return
        if rule is None and any(flow.kind is not Kind.FIXED for flow in flows):
            raise _refused(node, "has no rule that says what it does to the batch")
        choice = None if rule is None else self._batch_choice(node, rule, operands)
        if rule is None or choice is None:
            flow = self._mixed(node, rule, flows)
            for index in outputs:
                self._define(node, index, flow)
            return
        for index in outputs:
            self._define(node, index, self._carried(node, rule, choice, flows, index))

    def _counts_samples(self, node: fx.Node) -> bool:
        """arange(batch size): 0, 1, ... along the batch."""
        if node.target is not _aten.arange.start_step or not self._positions((node, 0)):
            return False
        return node.args[:1] == (0,) and len(node.args) == 2 and shape_of(node) != shape_of(self._parts[node])

    def _found_by_place(self, node: fx.Node, operands: Sequence[fx.Node], flows: Sequence[Flow]) -> Flow:
        """x[arange(batch), j]: every sample reads, or with index_put writes, its own row."""
        if node.target not in _BY_PLACE:
            raise _refused(node, "computes with the place of a sample in the batch")
        source, indices = operands[0], node.args[1]
        assert isinstance(indices, list | tuple)
        found = self._positions(value_of(source))
        places = [dim for dim, index in enumerate(indices) if index is not None and self._flow_at(index).counts]
        whole = len(found) == 1 and shape_of(source)[found[0][0]] == self._size
        if not whole or places != [found[0][0]] or any(f.kind is Kind.AVERAGED or f.degree != 0 for f in flows):
            raise _refused(node, "looks up samples of the batch")
        return Flow(Kind.SAMPLES, data_only=all(flow.data_only for flow in flows))

    def _flow_at(self, node: object) -> Flow:
        assert isinstance(node, fx.Node)
        return self.flows[value_of(node)]

    def _batch_choice(self, node: fx.Node, rule: Rule, operands: Sequence[fx.Node]) -> AxisChoice | None:
        """The one name of the rule that is the batch; None where no tensor of the operator carries it."""
        carries = [bool(self._positions(value_of(operand))) for operand in operands]
        made = [bool(self._positions((node, index))) for index in _outputs(node)]
        if not any(carries) and not any(made):
            return None
        choices = [
            c
            for c in choices_of(node, rule, self._factorisation)
            if c.atom_class in self._batch and c.beside is None  # a pair splits what one of the others splits
        ]
        if len(choices) != 1:
            raise _refused(node, "pairs samples with each other" if choices else "acts across samples")
        choice = choices[0]
        split = [isinstance(placement, Shard) for placement in choice.inputs]
        if split != carries:
            raise _refused(node, "acts across samples")
        return choice

    def _carried(self, node: fx.Node, rule: Rule, choice: AxisChoice, flows: Sequence[Flow], index: int) -> Flow:
        """The flow of one output of an operator that has the batch among its names."""
        assert choice.name is not None
        if any(flow.kind is Kind.AVERAGED for flow in flows):
            raise _refused(node, "mixes samples with a value that is contracted over the batch")
        placement = choice.outputs[index]
        if choice.name in rule.synchronised_bytes or isinstance(placement, Replicate):
            raise _refused(node, "computes statistics of the batch")
        if is_random(node):
            self._record_draw(node, index)
        degree = _degree(node, self._parts[node], self._count, rule, flows)
        data_only = all(flow.data_only for flow in flows)
        if isinstance(placement, Shard):
            if rule.needs_one_range(choice.name):
                raise _refused(node, "depends on the place of a sample in the batch")
            return Flow(Kind.SAMPLES, degree, data_only)
        if placement != Partial("sum"):
            raise _refused(node, "takes an extremum over the batch")
        is_mean = node.target in _MEANS
        if choice.name in rule.implementations and not is_mean:
            raise _refused(node, "contracts the batch by more than a sum")
        return Flow(Kind.AVERAGED, degree if is_mean else degree + 1, data_only)

    def _record_draw(self, node: fx.Node, index: int) -> None:
        """Random numbers belong to an element of the whole batch: its samples must lie outermost in one dim."""
        found = self._positions((node, index))
        if index == 0 and (not found or found[0][1] != 0):
            raise _refused(node, "draws random numbers for samples that do not lie outermost in a dim")
        if index == 0:
            self.draws[str(node.meta["operator"])] = found[0][0]

    def _mixed(self, node: fx.Node, rule: Rule | None, flows: Sequence[Flow]) -> Flow:
        """The flow of the outputs of an operator that no sample enters."""
        data_only = all(flow.data_only for flow in flows)
        averaged = any(flow.kind is Kind.AVERAGED for flow in flows)
        if averaged and node.target is _aten._to_copy.default and not node.meta["val"].is_floating_point():
            raise _refused(node, "rounds a value that is contracted over the batch")
        degree = _degree(node, self._parts[node], self._count, rule, flows)
        return Flow(Kind.AVERAGED if averaged else Kind.FIXED, degree, data_only)

    # -- statistics

    def read(self, value: Value, reader: fx.Node) -> Flow:
        """What an operator finds as one of its operands: a statistic of the batch is fixed for it."""
        return self._flow_of(value, reader)

    def _flow_of(self, value: Value, reader: fx.Node) -> Flow:
        """What `reader` finds: an average over inputs alone is fixed for all but the casts and views behind it."""
        flow = self.flows[value]
        if flow.kind is not Kind.AVERAGED or not flow.data_only or self.stays_average(reader):
            return flow
        node = value[0]
        if not isinstance(node.meta["val"], torch.Tensor):
            raise _refused(node, "computes several statistics of the batch at once")
        if node.meta.get("phase") == "backward":
            raise _refused(reader, "reads a statistic of the batch that only backward computes")
        self.statistics[node] = None
        return Flow(Kind.FIXED, flow.degree if self.reads_average(node) else 0)

    def reads_average(self, statistic: fx.Node) -> bool:
        """Whether a statistic enters as the average of the micro-batches; counts of samples are no averages."""
        return self._average and bool(statistic.meta["val"].is_floating_point())

    @staticmethod
    def stays_average(reader: fx.Node) -> bool:
        """Whether the reader only changes dtype or shape: the statistic is taken behind it."""
        return reader.meta.get("phase") != "backward" and (
            is_view(reader) or (reader.target is _aten._to_copy.default and reader.meta["val"].is_floating_point())
        )

    # -- ends

    def _loss_degree(self) -> int:
        pairs = list(zip(self._whole.returned, self._whole.outputs, strict=True))
        outside = [entry.name for entry in self._whole.inputs if entry.role == "tangent" and entry.shape]
        losses = [node for node, output in pairs if output.role == "loss"]
        if not losses:
            raise NotSeparable("the model returns no loss, so gradients of its outputs come from outside")
        if outside:
            raise NotSeparable(f"gradients of the output {outside[0]} come from outside (differentiable=)")
        for node, output in pairs:
            if output.role == "mutation":
                raise NotSeparable(f"forward changes {output.name}, once for the whole batch")
            if output.role == "output" and isinstance(node, fx.Node):
                self._check_output(node, output.name)
        flow = self.flows[value_of(losses[0])]
        if flow.kind is Kind.SAMPLES:
            raise NotSeparable("the loss is no sum over samples")
        return flow.degree

    def _scalar_degrees(self) -> dict[str, int]:
        """The degrees of the loss and of further ones, which parts give no tangent but zero."""
        flows = {
            output.name: self.flows[value_of(node)]
            for node, output in zip(self._whole.returned, self._whole.outputs, strict=True)
            if output.role in ("loss", "output") and isinstance(node, fx.Node)
        }
        return {name: flow.degree for name, flow in flows.items()}

    def _check_output(self, node: fx.Node, name: str) -> None:
        flow = self.flows[value_of(node)]
        if flow.kind is Kind.SAMPLES and (flow.degree != 0 or self._positions(value_of(node))[0][1] != 0):
            raise NotSeparable(f"the output {name} cannot be put together from micro-batches")


def _check_gradients(whole: Program, flows: Mapping[Value, Flow]) -> None:
    roles = {entry.name: entry.role for entry in whole.inputs if entry.role in ("parameter", "input")}
    for node, output in zip(whole.returned, whole.outputs, strict=True):
        if output.role != "gradient" or not isinstance(node, fx.Node):
            continue
        flow = flows[value_of(node)]
        if roles.get(output.name) == "input":
            raise NotSeparable(f"the input {output.name} wants a gradient")
        if flow.kind is Kind.SAMPLES or flow.degree != 1:
            raise NotSeparable(f"the gradient of {output.name} is no sum over samples")


def _degree(node: fx.Node, part: fx.Node, count: int, rule: Rule | None, flows: Sequence[Flow]) -> int:
    """The degree of what an operator computes; part: the same node of one of `count` micro-batches. Raises NotSeparable
    where an average or a degree does not pass."""
    written = _written_degree(node, part, count)
    bound = [flow.kind is Kind.AVERAGED or flow.degree != 0 for flow in flows]
    if not any(bound):
        return written
    if node.target in _PRODUCTS and len(flows) == 2:
        return _product_degree(node, flows)
    if _keeps_or_zeroes(node) and not bound[0]:
        return flows[1].degree + written
    patterns = rule.linear if rule is not None else ()
    for pattern in patterns:
        degrees = {flow.degree for flow, marked in zip(flows, pattern, strict=True) if marked}
        if len(degrees) == 1 and all(m or not b for m, b in zip(pattern, bound, strict=True)):
            return degrees.pop() + written
    if any(flow.kind is Kind.AVERAGED for flow in flows):
        raise _refused(node, "is not linear in a value that is contracted over the batch")
    raise _refused(node, "is not linear in a value that is scaled by the batch size")


def _product_degree(node: fx.Node, flows: Sequence[Flow]) -> int:
    first, second = flows
    sign = _PRODUCTS[node.target]
    if second.kind is Kind.AVERAGED and (sign < 0 or first.kind is Kind.AVERAGED):
        raise _refused(node, "multiplies or divides by a value that is contracted over the batch")
    return first.degree + sign * second.degree


def _written_degree(node: fx.Node, part: fx.Node, count: int) -> int:
    """The degree that numbers among the arguments add, where they follow the batch size."""
    degree = 0
    names = [argument.name for argument in getattr(getattr(node.target, "_schema", None), "arguments", ())]
    for position, (a, b) in enumerate(zip(node.args, part.args, strict=True)):
        if _numbers(a) == _numbers(b):
            continue
        if position == 1 and node.target in _PRODUCTS:
            degree += _PRODUCTS[node.target] * _ratio(node, count, a, b)
        elif _FILLS.get(node.target) == position:
            degree += _ratio(node, count, a, b)
        elif position >= len(names) or names[position] not in _SHAPES:
            raise _refused(node, "computes with the size of the batch")
    if [_numbers(v) for v in node.kwargs.values()] != [_numbers(v) for v in part.kwargs.values()]:
        raise _refused(node, "computes with the size of the batch")
    return degree


def _ratio(node: fx.Node, count: int, whole: object, part: object) -> int:
    if isinstance(whole, int | float) and isinstance(part, int | float):
        if math.isclose(whole, part * count, rel_tol=1e-12):
            return 1
        if math.isclose(whole * count, part, rel_tol=1e-12):
            return -1
    raise _refused(node, "computes with the size of the batch")


def _outputs(node: fx.Node) -> list[int]:
    """Indices of the outputs that are tensors."""
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    return [index for index, item in enumerate(values) if isinstance(item, torch.Tensor)]


def _numbers(argument: object) -> list[object]:
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, int | float) and not isinstance(leaf, bool)]


def _keeps_or_zeroes(node: fx.Node) -> bool:
    """Whether the operator is where(mask, value, 0), which is linear in the value: a masked gradient."""
    if node.target is not _aten.where.self:
        return False
    other = node.args[2]
    if not isinstance(other, fx.Node) or other.target not in _FILLS:
        return False
    return float(other.args[_FILLS[other.target]]) == 0.0  # type: ignore[arg-type]


def _refused(node: fx.Node, why: str) -> NotSeparable:
    return NotSeparable(f"{node.meta.get('operator', node.name)} ({node.target}) {why}")

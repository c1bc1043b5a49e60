"""In how little room forward may save a value: what its readers in backward allow, and what it takes.

    relu, read by its own backward alone        mask                    1 bit a value, nothing is lost
    a bool, as that of dropout                  mask                    8 to a byte, nothing is lost
    what a weight's gradient reads (mm)         8bit, 4bit, 2bit        gradients have an exact mean, and more variance
    what gelu_backward reads                    8bit                    the same up to terms of the square of a step
    what a loss reads, statistics, choices      -

A ReLU that a product reads, too, is rounded for the product and keeps a bit a value for its own backward. Two operators
of backward that read one value linearly are no longer linear together where one reads what the other makes: such values
are taken as smooth. What is made again from a rounded value is a smooth function of it, so that only 8 bits may serve
it; and nothing is made again from them that a choice (an index, a comparison) follows from, or from a mask.

How much variance. Of a group of 256 values that are spread as a normal distribution is, the range is `RANGE` standard
deviations in the mean, and rounding by chance adds a sixth of the square of a step: to a weight's gradient, at most
`added_variance(bits)` of the variance that it has over samples, by the formula of ActNN (Chen et al., 2021, theorem 2):
that of sums over samples is what x itself gives. Longer tails have larger ranges and add more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import fx

from autopar.graphs.backward_readers import Reading, reading
from autopar.graphs.operator_names import base_name
from autopar.ops.saved_forms import GROUP, RANGE_BYTES
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.problem.factorisation import Value
from autopar.planner.problem.graph_operators import base_of
from autopar.plans.plan_value import MASK, ROUNDED_BITS

RANGE = 5.64
"""The mean range of 256 values of a normal distribution, in standard deviations."""
CHOICES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def added_variance(bits: int) -> float:
    """Part of the variance over samples that rounding to so many bits adds, of values in a normal distribution."""
    return float((RANGE / (2**bits - 1)) ** 2 / 6)


def allowed_forms(lowest: str | None) -> tuple[str, ...]:
    """What `lossy=` allows beside the mask: the forms down to the one that it names."""
    names = tuple(ROUNDED_BITS)
    return names[: names.index(lowest) + 1] if lowest in ROUNDED_BITS else ()


class PossibleForms:
    """The forms of what one program saves."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._readings: dict[Value, Reading] = {}
        self._signs: dict[Value, bool] = {}
        self._is_chosen_from, self._leads_to_parameter = _forward_facts(lifetimes)

    def of(self, node: fx.Node, rounded: Sequence[str]) -> tuple[str, ...]:
        """The forms in which an operator's outputs may be saved, but for as they are. rounded: those that are allowed
        beside the mask."""
        outputs = self._lifetimes.saved_outputs(node)
        masked = any(self._takes_mask((node, output)) for output in outputs)
        found = self._reading((node, 0)) if 0 in outputs and self._may_round(node) else "exact"
        most = {"linear": len(rounded), "smooth": 1}.get(found, 0)
        return ((MASK,) if masked else ()) + tuple(rounded[:most])

    def kept_part(self, value: Value, form: str) -> float:
        """What a value takes in a form, as a part of what it takes as it is."""
        node, output = value
        itemsize = _tensor(value).dtype.itemsize
        if self._takes_mask(value):
            return 1 / (8 * itemsize)
        if form == MASK or output or not self._may_round(node):
            return 1.0
        bits = ROUNDED_BITS[form] + 8 * RANGE_BYTES / GROUP + self._signs[value]
        return bits / (8 * itemsize)

    def serves(self, node: fx.Node, form: str, reader: fx.Node) -> bool:
        """Whether a reader in forward may be computed again from what was saved in a form."""
        if form == MASK:
            return not any(self._takes_mask((node, o)) and _is_float((node, o)) for o in self._read(reader, node))
        return ROUNDED_BITS[form] == max(ROUNDED_BITS.values()) and reader not in self._is_chosen_from

    def _read(self, reader: fx.Node, node: fx.Node) -> list[int]:
        return self._lifetimes.outputs_read(reader, node)

    def _takes_mask(self, value: Value) -> bool:
        """A bool, or what is asked for its sign alone."""
        return _tensor(value).dtype == torch.bool or (_is_float(value) and self._reading(value) == "sign")

    def _may_round(self, node: fx.Node) -> bool:
        readers = self._lifetimes.forward_readers.get((node, 0), ())
        choosing = any(_makes_choice(reader) for reader in readers)
        return _is_float((node, 0)) and node in self._leads_to_parameter and not choosing

    def _reading(self, value: Value) -> Reading:
        """The most demanding of all readers of a value in backward; "smooth" for what only forward's readers, made
        again, want."""
        if value not in self._readings:
            self._readings[value] = self._read_by_all(value)
        return self._readings[value]

    def _read_by_all(self, value: Value) -> Reading:
        readers = self._lifetimes.backward_readers.get(value, ())
        found = {reader: _reading_of(reader, value) for reader in readers}
        kinds = set(found.values())
        self._signs[value] = "sign" in kinds
        if self._lifetimes.backward_of(value) and not readers:
            return "exact"  # returned as a gradient
        if "exact" in kinds:
            return "exact"
        linear = [reader for reader, kind in found.items() if kind == "linear"]
        if "smooth" in kinds or not readers or self._follow(linear):
            return "smooth"
        return "linear" if linear else "sign"

    def _follow(self, readers: Sequence[fx.Node]) -> bool:
        """Whether one of several readers of a value reads what follows from another."""
        position = self._lifetimes.position
        last = max((position[reader] for reader in readers), default=0)
        for first in readers if len(readers) > 1 else ():
            stack, seen = [first], {first}
            while stack:
                for user in stack.pop().users:
                    if user in seen or position.get(user, last) > last:
                        continue
                    if user in readers:
                        return True
                    seen.add(user)
                    stack.append(user)
        return False


@lru_cache(maxsize=8)
def forms_of(lifetimes: Lifetimes) -> PossibleForms:
    """Those of a program: what its readers ask for is found once."""
    return PossibleForms(lifetimes)


def _reading_of(reader: fx.Node, value: Value) -> Reading:
    """How an operator reads a value, through views, at all of its arguments together."""
    places = [
        place
        for place, argument in enumerate(reader.args)
        if isinstance(argument, fx.Node) and _is_tensor(argument) and base_of(argument)[0] == value
    ]
    kinds = {reading(reader, place) for place in places}
    if len(places) != 1:
        return "smooth" if kinds == {"linear"} else "exact"
    return kinds.pop()


def _forward_facts(lifetimes: Lifetimes) -> tuple[set[fx.Node], set[fx.Node]]:
    """(operators of forward that make a choice, or from which one follows in their segment; those behind which a
    parameter is still read: what comes later is a loss)."""
    chosen, later = set[fx.Node](), set[fx.Node]()
    parameters = set(lifetimes.gradient_position)
    forward = [node for node in lifetimes.in_order if node.meta["phase"] != "backward"]
    readers: Mapping[fx.Node, list[fx.Node]] = _readers_of(forward, lifetimes)
    for node in reversed(forward):
        read = readers.get(node, [])
        home = lifetimes.segment[node]
        if _makes_choice(node) or any(one in chosen and lifetimes.segment[one] == home for one in read):
            chosen.add(node)
        if any(one in later or any(base_of(o)[0][0] in parameters for o in _operands(one)) for one in read):
            later.add(node)
    return chosen, later


def _readers_of(forward: Sequence[fx.Node], lifetimes: Lifetimes) -> dict[fx.Node, list[fx.Node]]:
    found: dict[fx.Node, list[fx.Node]] = {node: [] for node in forward}
    for (node, _), readers in lifetimes.forward_readers.items():
        if node in found:
            found[node] += readers
    return found


def _operands(node: fx.Node) -> list[fx.Node]:
    return [operand for operand in node.all_input_nodes if _is_tensor(operand)]


def _makes_choice(node: fx.Node) -> bool:
    """Whether an operator makes indices or flags; those of dropout follow from no value."""
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    return base_name(node.target) != "dropout" and any(getattr(one, "dtype", None) in CHOICES for one in values)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _tensor(value: Value) -> torch.Tensor:
    node, output = value
    made = node.meta["val"]
    tensor = made[output] if isinstance(made, tuple | list) else made
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _is_float(value: Value) -> bool:
    return _tensor(value).is_floating_point()

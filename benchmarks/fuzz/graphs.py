"""Random small graphs of the rule table's operators, with real values.

A step takes one of the cases with which the rule tests prove an operator, and feeds values that the graph already has
into it: a value of another shape is brought there by views, slices, pads and repeats, which are operators too.

    x3 = mul(x1, x2);  x4 = view(x3, [4, 6]);  x5 = mm(x4, x0);  x6 = cat([x5, x5], 0)

Operators that jump (comparisons, sorting, rounding) get fresh inputs only: rounding errors of a sharded sum would
decide ties otherwise. Steps whose values are not finite or large are drawn again.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.program import Input, Output, Program
from tests.rules.case_values import Case
from tests.rules.operator_cases import CASES

SIZES = (5, 7, 8, 9, 12, 13)
LARGEST_VALUE, LARGEST_TENSOR = 1e3, 4096
_JUMPS = (
    *("sign", "floor", "ceil", "round", "trunc", "heaviside", "fmod", "remainder", "frac", "Tensor_mode"),
    *("linalg", "geqrf"),
)
_NO_VALUES = ("empty",)
_aten = torch.ops.aten


@dataclass(frozen=True)
class RandomGraph:
    """A forward-only program and the global value of each of its inputs, by name."""

    program: Program
    tensors: dict[str, Tensor]


@dataclass
class _Builder:
    rng: random.Random
    reuse: float
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[Input] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    floats: list[fx.Node] = field(default_factory=list)
    count: int = 0

    def placeholder(self, value: Tensor) -> fx.Node:
        name = f"x{len(self.inputs)}"
        node = self.graph.placeholder(name)
        node.meta.update(val=value, phase="forward", operator=name)
        self.inputs.append(Input(role="input", name=name, shape=tuple(value.shape), dtype=value.dtype))
        self.tensors[name] = value
        return node

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Append a call and run it on the real values."""
        node = self.graph.call_function(target, args, kwargs or {})
        values, keywords = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        self.count += 1
        result = pytree.tree_map_only(Tensor, Tensor.contiguous, target(*values, **keywords))  # strides mean nothing
        node.meta.update(
            val=tuple(result) if isinstance(result, list) else result, phase="forward", operator=f"op#{self.count}"
        )
        return node

    def step(self, case: Case) -> bool:
        """Append one operator; False if its values are of no use (nothing is appended then)."""
        last = next(iter(reversed(self.graph.nodes)), None)
        state = len(self.inputs), len(self.floats), self.count
        jumps = _jumps(case)
        size = self.rng.choice(SIZES)
        leaves, spec = pytree.tree_flatten((case.build(size), dict(case.kwargs)))
        saved = "backward" in str(case.target)  # operands behind the gradient were saved and belong together
        found = [
            self.operand(leaf, jumps or (saved and at > 0)) if isinstance(leaf, Tensor) else leaf
            for at, leaf in enumerate(leaves)
        ]
        args, kwargs = pytree.tree_unflatten(found, spec)
        try:
            node = self.call(case.target, tuple(args), kwargs)
        except RuntimeError:  # strides that the plain operator refuses
            self._take_back(last, *state)
            return False
        outputs = self.outputs_of(node)
        if not all(_is_tame(output.meta["val"]) for output in outputs):
            self._take_back(last, *state)
            return False
        self.floats += [n for n in outputs if n.meta["val"].dtype == torch.float64 and n.meta["val"].numel()]
        return True

    def outputs_of(self, node: fx.Node) -> list[fx.Node]:
        value = node.meta["val"]
        if isinstance(value, Tensor):
            return [node]
        found = []
        for index, output in enumerate(value):
            if isinstance(output, Tensor):
                item = self.graph.call_function(operator.getitem, (node, index))
                item.meta.update(val=output, phase="forward", operator=node.meta["operator"])
                found.append(item)
        return found

    def operand(self, value: Tensor, fresh: bool) -> fx.Node:
        """A placeholder of this value, or a value of the graph brought to its shape."""
        usable = value.dtype == torch.float64 and value.numel() and self.floats and not fresh
        if not usable or self.rng.random() > self.reuse:
            return self.placeholder(value)
        source = self.rng.choice(self.floats)
        return self.adapted(source, tuple(value.shape))

    def adapted(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """`node` as a tensor of `shape`."""
        have = tuple(node.meta["val"].shape)
        if have == shape:
            return node
        if sorted(have) == sorted(shape) and len(set(shape)) == len(shape):
            return self.call(_aten.permute.default, (node, [have.index(size) for size in shape]))
        if math.prod(have) == math.prod(shape):
            return self.call(_aten.reshape.default, (node, list(shape)))
        if len(have) == len(shape) and have:
            return self._resized(node, shape)
        return self._reflowed(node, shape)

    def _resized(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """Dim by dim: cut, padded, or expanded from 1."""
        for dim, size in enumerate(shape):
            have = node.meta["val"].shape[dim]
            if have > size:
                node = self.call(_aten.slice.Tensor, (node, dim, 0, size))
            elif have == 1 and size > 1:
                wide = list(node.meta["val"].shape)
                wide[dim] = size
                node = self.call(_aten.expand.default, (node, wide))
            elif have < size:
                pad = [0, 0] * (len(shape) - 1 - dim) + [0, size - have]
                node = self.call(_aten.constant_pad_nd.default, (node, pad, 0.5))
        return node

    def _reflowed(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """All elements in a row, repeated and cut to the number that is needed."""
        need, have = math.prod(shape), node.meta["val"].numel()
        node = self.call(_aten.reshape.default, (node, [have]))
        if have < need:
            node = self.call(_aten.repeat.default, (node, [-(-need // have)]))
        if node.meta["val"].numel() > need:
            node = self.call(_aten.slice.Tensor, (node, 0, 0, need))
        return self.call(_aten.reshape.default, (node, list(shape))) if shape != (need,) else node

    def _take_back(self, last: fx.Node | None, inputs: int, floats: int, count: int) -> None:
        for node in reversed(self.graph.nodes):
            if node is last:
                break
            self.graph.erase_node(node)
        for dropped in self.inputs[inputs:]:
            del self.tensors[dropped.name]
        del self.inputs[inputs:], self.floats[floats:]
        self.count = count

    def program(self) -> Program:
        """Everything that is computed and not a view's source only is returned."""
        returned = [n for n in self.graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], Tensor)]
        returned = [n for n in returned if not n.users or self.rng.random() < 0.3]
        self.graph.output(tuple(returned))
        _placeholders_first(self.graph)
        outputs = tuple(Output(role="output", name=f"y{i}") for i in range(len(returned)))
        _, spec = pytree.tree_flatten(((), {}))
        return Program(
            graph_module=fx.GraphModule({}, self.graph),
            inputs=tuple(self.inputs),
            outputs=outputs,
            in_spec=spec,
            tensor_leaves=(),
            out_spec=spec,
            output_leaves=(),
            training=False,
        )


def random_graph(rng: random.Random, cases: Sequence[Case] = CASES, steps: int = 5, reuse: float = 0.8) -> RandomGraph:
    """A graph of `steps` operators out of `cases`; each fp64 operand is, with probability `reuse`, a value of the
    graph. `rng` and torch's generator decide everything."""
    usable = [case for case in cases if not any(word in str(case.target) for word in _NO_VALUES)]
    builder = _Builder(rng, reuse)
    done = attempts = 0
    while done < steps and attempts < 10 * steps:
        attempts += 1
        done += builder.step(rng.choice(usable))
    return RandomGraph(builder.program(), builder.tensors)


@cache
def _jumps(case: Case) -> bool:
    """Whether tiny changes of the operands may change the results by much."""
    if any(word in str(case.target) for word in _JUMPS):
        return True
    arguments = case.build(SIZES[0])
    results = pytree.tree_leaves(case.target(*arguments, **case.kwargs))
    takes_floats = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in pytree.tree_leaves(arguments))
    return takes_floats and any(isinstance(r, Tensor) and not r.is_floating_point() for r in results)


def _is_tame(value: Tensor) -> bool:
    if value.numel() > LARGEST_TENSOR:
        return False
    return not value.is_floating_point() or bool((value.abs() <= LARGEST_VALUE).all())


def _placeholders_first(graph: fx.Graph) -> None:
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if first is not None:
            first.prepend(node)

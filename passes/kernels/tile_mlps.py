"""The products of an MLP and what stands between them become one operator in tiles of rows (`ops/tiled_mlp.py`).

    g = mm(x, gate.t()); u = mm(x, up.t()); h = gated(g, u, "silu"); out = mm(h, down.t())
        -->   out = autopar::tiled_mlp(x, [gate, up], [], down, "silu", False)
    six products and gated_backward in backward
        -->   grad_x, grad_gate, grad_up, grad_down = autopar::tiled_mlp_backward(grad, x, ...)

An MLP is found by its activation: a gated one, written out or a kernel of ours, or GELU, ReLU or SiLU of one product.
It is replaced forward and backward together, and only if nobody else reads what it makes in between. The bias of the
last product stays behind it. Left alone: dropout between the products, frozen weights and another dtype in between.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.graphs.node_values import is_backward
from autopar.passes.kernels.found_groups import found_groups
from autopar.passes.kernels.graph_patterns import dtype_of, name_of, readers_of, shape_of, unviewed
from autopar.passes.kernels.graph_writer import GraphWriter

aten = torch.ops.aten
ours = torch.ops.autopar


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """inputs: what it reads, its gate first; inside: its nodes; grad: of `out`, None without backward; grads: of
    `inputs`."""

    name: str
    inputs: tuple[fx.Node, ...]
    out: fx.Node
    inside: Collection[fx.Node]
    grad: Any = None
    grads: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A product of rows (N, in) with a weight; columns: the weight lies (in, out); out: with the bias, where it has
    one."""

    product: fx.Node
    rows: fx.Node
    weight: fx.Node
    columns: bool
    out: fx.Node
    bias: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """What the gradient of the rows stands for. addition: of a product's gradient to `other`, from which it is gone
    then; None where both products' are added to each other."""

    gradient: fx.Node
    addition: fx.Node | None = None
    other: fx.Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """linears: in front of the activation; down: behind it; grad: of the result of `down`, None without backward;
    of_rows, of_parameters: gradients, those of weights, biases and the weight of `down`."""

    activation: Activation
    linears: Sequence[Linear]
    down: Linear
    grad: fx.Node | None = None
    of_rows: Joined | None = None
    of_parameters: Sequence[fx.Node] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of both operators, without the gradient."""
        first, weights = self.linears[0], [one.weight for one in self.linears]
        biases = [one.bias for one in self.linears if one.bias is not None]
        return first.rows, weights, biases, self.down.weight, self.activation.name, first.columns


def tile_mlps(write: GraphWriter, graph: fx.Graph) -> None:
    """Replace every MLP, in place."""
    for mlp in [mlp for one in _activations(graph) if (mlp := _mlp(one)) is not None]:
        around = mlp.activation
        write.replace(ours.tiled_mlp.default, mlp.arguments, (mlp.down.product,), like=around.out)
        if mlp.of_rows is not None:
            if mlp.of_rows.addition is not None and mlp.of_rows.other is not None:
                write.pass_on(mlp.of_rows.addition, mlp.of_rows.other)
            arguments, gradients = (mlp.grad, *mlp.arguments), (mlp.of_rows.gradient, *mlp.of_parameters)
            write.replace(ours.tiled_mlp_backward.default, arguments, gradients, like=around.grads[0])


def _activations(graph: fx.Graph) -> Iterator[Activation]:
    for group in found_groups(graph, "gated"):
        match = group.match
        yield Activation(
            name=group.pattern.name.removeprefix("gated "),
            inputs=(match["gate"], match["up"]),
            out=match["out"],
            inside=match.nodes,
            grad=match["grad"] if group.has_backward else None,
            grads=(match["grad_gate"], match["grad_up"]) if group.has_backward else (),
        )
    for node in graph.nodes:
        if node.target is ours.gated.default:
            yield _gated(node)
        elif node.target in BACKWARD_OF:
            yield _plain(node)


def _gated(node: fx.Node) -> Activation:
    gate, up, name = node.args
    behind = [one for one in readers_of(unviewed(gate)) if one.target is ours.gated_backward.default]
    grads = [_item(one, at) for one in behind for at in range(2)]
    return _around(node, str(name), (gate, up), behind, grads)


def _plain(node: fx.Node) -> Activation:
    """Of one tensor; the backward of ReLU reads its result, those of others what it reads."""
    x, is_relu = node.args[0], node.target is aten.relu.default
    readers = readers_of(node if is_relu else unviewed(x))
    behind = [one for one in readers if one.target is BACKWARD_OF[node.target] and one.kwargs == node.kwargs]
    tanh = "_tanh" if node.kwargs.get("approximate") == "tanh" else ""
    return _around(node, f"{name_of(node)}{tanh}", (x,), behind, behind)


def _around(
    node: fx.Node, name: str, inputs: Iterable[Any], behind: Sequence[fx.Node], grads: Iterable[fx.Node | None]
) -> Activation:
    return Activation(
        name=name,
        inputs=tuple(inputs),
        out=node,
        inside={node, *behind},
        grad=behind[0].args[0] if behind else None,
        grads=tuple(one for one in grads if one is not None),
    )


BACKWARD_OF: Mapping[Any, Any] = {
    aten.gelu.default: aten.gelu_backward.default,
    aten.silu.default: aten.silu_backward.default,
    aten.relu.default: aten.threshold_backward.default,
}


def _mlp(activation: Activation) -> Mlp | None:
    """The MLP around an activation; None where there is none, or where somebody else reads what is inside."""
    linears = [one for value in activation.inputs if (one := _in_front(value, activation)) is not None]
    if len(linears) < len(activation.inputs) or not _are_alike(linears):
        return None
    readers = [one for one in readers_of(activation.out) if one not in activation.inside]
    forward = [one for one in readers if not is_backward(one)]
    behind = [one for one in readers if is_backward(one)]
    down = _linear(forward[0]) if len(forward) == 1 else None
    if down is None or len(behind) != (activation.grad is not None) or not _follows(down, activation, linears[0]):
        return None
    mlp = Mlp(activation=activation, linears=linears, down=down)
    return _with_backward(mlp, behind[0]) if behind else mlp


def _in_front(value: fx.Node, activation: Activation) -> Linear | None:
    """The product, with its bias, that an activation alone reads."""
    out = unviewed(value)
    found = _linear(out) or _with_bias(out)
    if found is None or not {*readers_of(out)} <= {*activation.inside}:
        return None
    return found if math.prod(shape_of(value)) == math.prod(shape_of(found.product)) else None


def _linear(product: Any) -> Linear | None:
    if name_of(product) != "mm":
        return None
    rows, right = product.args
    turned = _turned(right)
    return Linear(product=product, rows=rows, weight=turned or right, columns=turned is None, out=product)


def _with_bias(addition: Any) -> Linear | None:
    """A product whose only reader adds a vector to each of its rows."""
    if name_of(addition) != "add" or len(addition.args) != 2 or addition.kwargs:
        return None
    for rows, bias in (addition.args, addition.args[::-1]):
        found = _linear(unviewed(rows))
        if found is not None and isinstance(bias, fx.Node) and readers_of(found.product) == [addition]:
            is_vector = shape_of(bias) == shape_of(found.product)[1:] == shape_of(addition)[-1:]
            return replace(found, bias=bias, out=addition) if is_vector else None
    return None


def _are_alike(linears: Sequence[Linear]) -> bool:
    """Whether different products take the same rows, with weights of one shape that lie the same way, all in one dtype
    and with a bias each or none."""
    forms = {(unviewed(one.rows), shape_of(one.rows), shape_of(one.weight), one.columns, one.bias is None)
             for one in linears}  # fmt: skip
    parts = [part for one in linears for part in (one.rows, one.weight, one.bias, one.out) if part is not None]
    return len(forms) == 1 and len({one.product for one in linears}) == len(linears) and _in_one_dtype(parts)


def _follows(down: Linear, activation: Activation, first: Linear) -> bool:
    """Whether a product takes what an activation returns of the first one's result, as it lies."""
    if unviewed(down.rows) is not activation.out or down.columns != first.columns:
        return False
    return shape_of(down.rows) == shape_of(first.product) and _in_one_dtype([first.rows, down.rows, down.weight])


def _with_backward(mlp: Mlp, of_down: fx.Node) -> Mlp | None:
    """With all gradients; None where one is missing, or where somebody else reads what is inside. of_down: what reads
    the hidden activations in backward."""
    activation, down = mlp.activation, mlp.down
    grad, of_hidden = _grad_behind(of_down, down), unviewed(activation.grad)
    if grad is None or not _is_gradient_of_rows(of_hidden, grad, down) or len(activation.grads) != len(mlp.linears):
        return None
    if not {*readers_of(of_hidden)} <= {*activation.inside}:
        return None
    found = [_gradients(linear, one) for linear, one in zip(mlp.linears, activation.grads, strict=True)]
    gradients = [one for one in found if one is not None]
    if len(gradients) < len(found) or not _in_one_dtype([grad, *activation.grads, down.rows]):
        return None
    rows, weights, *biases = zip(*gradients, strict=True)
    of_rows = _joined(rows)
    if of_rows is None:
        return None
    parameters = (*weights, *(biases[0] if biases else ()), of_down)
    return replace(mlp, grad=grad, of_rows=of_rows, of_parameters=parameters)


def _gradients(linear: Linear, grad: fx.Node) -> tuple[fx.Node, ...] | None:
    """What reads the gradient of a product's result: gradients of its rows, of its weight, of its bias."""
    readers = readers_of(grad)
    rows = [one for one in readers if _is_gradient_of_rows(one, grad, linear)]
    weights = [one for one in readers if unviewed(_grad_behind(one, linear)) is unviewed(grad)]
    biases = [one for one in readers if name_of(one) == "sum" and _is_over_rows(one)]
    counts = (len(rows), len(weights), len(biases))
    is_whole = counts == (1, 1, int(linear.bias is not None)) and len(readers) == sum(counts)
    return (*rows, *weights, *biases) if is_whole else None


def _is_gradient_of_rows(product: Any, grad: fx.Node, linear: Linear) -> bool:
    """grad @ weight, as nn.Linear's lies."""
    if name_of(product) != "mm" or unviewed(product.args[0]) is not unviewed(grad):
        return False
    right = product.args[1]
    return (_turned(right) if linear.columns else right) is linear.weight


def _grad_behind(product: Any, linear: Linear) -> fx.Node | None:
    """Of the gradient of a weight, a product of rows with the gradient of their result, that gradient; None for any
    other product."""
    turned = _turned(product.args[0]) if name_of(product) == "mm" else None
    if turned is None:
        return None
    rows, grad = (turned, product.args[1]) if linear.columns else (product.args[1], turned)
    return grad if unviewed(rows) is unviewed(linear.rows) else None


def _is_over_rows(total: Any) -> bool:
    return total.args[1] == [0] and len(shape_of(total.args[0])) == 2


def _joined(products: Sequence[fx.Node]) -> Joined | None:
    """Where gradients of the same rows become one; None where they do not, or where a part of their sum is read."""
    if len(products) == 1:
        return Joined(products[0])
    first, second = map(_additions, products)
    if not {*first} & {*second}:
        return None
    addition = first[0]
    if addition is second[0]:
        return Joined(addition)
    (other,) = (one for one in addition.args if unviewed(one) is not products[0])
    return Joined(products[1], addition, other)  # type: ignore[arg-type]  # a node, as `_additions` asserts


def _additions(node: fx.Node) -> list[fx.Node]:
    """The additions that a value goes through, while nobody else reads the sum."""
    found = []
    while len(readers := readers_of(node)) == 1 and name_of(readers[0]) == "add":
        (total,) = readers
        operands = [one for one in total.args if isinstance(one, fx.Node) and shape_of(one) == shape_of(total)]
        if len(operands) != 2 or total.kwargs or sum(unviewed(one) is node for one in operands) != 1:
            break
        found.append(total)
        node = total
    return found


def _turned(value: Any) -> fx.Node | None:
    """The matrix that a node transposes; None for any other node."""
    found: fx.Node | None = value.args[0] if name_of(value) == "permute" and value.args[1] == [1, 0] else None
    return found


def _in_one_dtype(nodes: Iterable[fx.Node]) -> bool:
    return len({dtype_of(node) for node in nodes}) == 1


def _item(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)

"""Replace groups of operators in a captured program by the operators that have kernels (`runtime/kernels/registry.py`).

    n = mul(mul(x, rsqrt(add(mean(pow(x, 2), [-1], True), eps))), w)     + 12 operators in backward
        -->   n, rstd = autopar::rms_norm(x, w, eps)                     + 1 operator in backward

The groups are those of `kernel_patterns`; beside them layer norms, and MLPs (`tile_mlps`). Every new value equals the
one that it replaces up to rounding, so backward reads the new values, and what only the old group kept for it is saved
no more. This happens before anything is planned: the new operators have rules, prices and places in memory as all
others have, and what is priced is what runs. An addition in front of a norm or behind its gradient joins it when graphs
are local (`join_additions`).
"""

from __future__ import annotations

import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.graphs.graph_copies import copied
from autopar.ops import (  # noqa: F401 (they are registered)
    cross_entropy,
    gated,
    linear_cross_entropy,
    norms,
    rope,
    tiled_mlp,
)
from autopar.passes.kernels.found_groups import FoundGroup, found_groups
from autopar.passes.kernels.graph_patterns import Match, dtype_of, name_of, readers_of, shape_of, unviewed
from autopar.passes.kernels.graph_writer import GraphWriter
from autopar.passes.kernels.tile_mlps import tile_mlps
from autopar.plans.plan_entries import KERNELS
from autopar.program import MicroProgram, Program

aten = torch.ops.aten
ours = torch.ops.autopar
AnyProgram = TypeVar("AnyProgram", Program, MicroProgram, Program | MicroProgram)
_known: weakref.WeakKeyDictionary[fx.Graph, dict[str, Program | None]] = weakref.WeakKeyDictionary()
"""What became of a graph by a kind of kernels; None: nothing."""


def with_kernels(program: AnyProgram, kinds: Collection[str]) -> AnyProgram:
    """The program in which a kernel of ours computes every group of these kinds that it takes; the program itself where
    it has none. kinds: of `plan_entries.KERNELS`, in whose order they are put in; what is replaced stays so."""
    if isinstance(program, MicroProgram):
        return replace(
            program, program=with_kernels(program.program, kinds), whole=with_kernels(program.whole, kinds)
        )
    for kind in KERNELS:
        if kind in kinds:
            known = _known.setdefault(program.graph, {})
            if kind not in known:
                known[kind] = _replaced(program, kind)
            program = known[kind] or program
    return program


def _replaced(program: Program, kind: str) -> Program | None:
    module = LazyGraphModule(program.graph_module, copied(program.graph))
    before = Counter(node.target for node in program.graph.nodes)
    use_kernels(module, kind)
    if Counter(node.target for node in module.graph.nodes) == before:
        return None
    return replace(program, graph_module=module)


def use_kernels(graph_module: fx.GraphModule, kind: str) -> None:
    """Replace every group that a kernel of this kind computes, in place."""
    write = GraphWriter(graph_module.graph)
    for group in found_groups(graph_module.graph, kind):
        REWRITES[group.pattern.name](write, group)
    target, rewrite = SINGLE.get(kind, (None, None))
    if rewrite is not None:
        for node in graph_module.graph.find_nodes(op="call_function", target=target):
            rewrite(write, node)
    if kind == "tiled_mlp":
        use_kernels(graph_module, "gelu")  # written out, it is no activation yet
        tile_mlps(write, graph_module.graph)
    write.erase_unread()


def _rms_norm(write: GraphWriter, group: FoundGroup) -> None:
    match = group.match
    x = next((one for one in (match["x"], match["wide"]) if dtype_of(one) == dtype_of(match["out"])), None)
    if x is None or not _is_rms_norm(x, group):
        return
    x, weight = write.current(x), match["weight"]
    new = write.replace(ours.rms_norm.default, (x, weight, match["eps"]), (match["out"], match["rstd"]))
    if group.has_backward:
        results, other = (match["grad_x"], match.values.get("grad_weight")), match["other"]
        arguments = (write.viewed(match["grad"], shape_of(x)), x, weight, new[-1], other)
        write.replace(ours.rms_norm_backward.default, arguments, results)


def _is_rms_norm(x: fx.Node, group: FoundGroup) -> bool:
    """Whether the numbers of the group are those of a norm over the last dim, whose row fits a kernel."""
    shape, match = shape_of(x), group.match
    last, width = len(shape) - 1, shape[-1]
    is_norm = isinstance(match["eps"], float) and shape_of(match["weight"]) == (width,)
    is_norm = is_norm and 0 < width <= norms.LARGEST_ROW and shape_of(match["out"]) == shape
    if group.has_backward:
        other = match["other"]
        is_norm = is_norm and (other is None or (shape_of(other), dtype_of(other)) == (shape, dtype_of(x)))
        is_norm = is_norm and list(match["last"]) in ([last], [-1]) and match["width"] == width
        is_norm = is_norm and list(match.values.get("rows", range(last))) == list(range(last))
    return is_norm


def _layer_norm(write: GraphWriter, node: fx.Node) -> None:
    x, sizes, weight, bias, eps = node.args
    results = [_item(node, index) for index in range(3)]
    backward = {user for item in results[1:] if item is not None for user in item.users}
    if weight is None or bias is None or not _is_one_row(x, sizes) or not all(map(_is_whole_backward, backward)):
        return
    write.replace(ours.layer_norm.default, (x, weight, bias, eps), results)
    for user in backward:
        grad, x, _, mean, rstd, weight, _, _ = user.args
        gradients = [_item(user, index) for index in range(3)]
        write.replace(ours.layer_norm_backward.default, (grad, x, weight, mean, rstd, None), gradients)


def _is_whole_backward(node: fx.Node) -> bool:
    """Whether a reader of the statistics is the backward of a layer norm that makes all its gradients."""
    if node.target is not aten.native_layer_norm_backward.default:
        return False
    return all(node.args[-1]) and _item(node, 0) is not None  # type: ignore[arg-type]  # a list of bools


def _is_one_row(x: Any, sizes: Any) -> bool:
    return len(sizes) == 1 and 0 < sizes[0] <= norms.LARGEST_ROW and shape_of(x)[-1] == sizes[0]


def _gated(write: GraphWriter, group: FoundGroup) -> None:
    match, activation = group.match, group.pattern.name.removeprefix("gated ")
    gate, up = match["gate"], match["up"]
    if shape_of(gate) != shape_of(up) or dtype_of(gate) != dtype_of(up):
        return
    write.replace(ours.gated.default, (gate, up, activation), (match["out"],))
    if group.has_backward:
        arguments = (write.viewed(match["grad"], shape_of(gate)), gate, up, activation)
        write.replace(ours.gated_backward.default, arguments, (match["grad_gate"], match["grad_up"]))


def _gelu_tanh(write: GraphWriter, group: FoundGroup) -> None:
    match, options = group.match, {"approximate": "tanh"}
    write.replace(aten.gelu.default, (match["x"],), (match["out"],), options)
    if group.has_backward:
        arguments = (write.viewed(match["grad"], shape_of(match["x"])), match["x"])
        write.replace(aten.gelu_backward.default, arguments, (match["grad_x"],), options)


def _rope(write: GraphWriter, group: FoundGroup) -> None:
    match = group.match
    x, cos, sin = (match[name] for name in ("x", "cos", "sin"))
    halves = (*shape_of(x)[:-1], 2, shape_of(x)[-1] // 2)
    turns = match["axis"] % len(halves) == len(halves) - 2 and shape_of(match["second"].args[0]) == halves
    angles = [shape_of(one) for one in (cos, sin)]
    batch = {shape[0] for shape in angles} <= {1, shape_of(x)[0]}
    if not turns or len(shape_of(x)) != 4 or not batch or any(s[1:] != (1, *shape_of(x)[2:]) for s in angles):
        return
    target = ours.rope_backward.default if group.pattern.of_backward else ours.rope.default
    flat = [write.viewed(one, (shape_of(one)[0], *shape_of(one)[2:])) for one in (cos, sin)]
    write.replace(target, (write.current(x), *flat, False), (match["out"],))


def _cross_entropy(write: GraphWriter, group: FoundGroup) -> None:
    match = group.match
    if len(shape_of(match["wide"])) != 2:  # classes per pixel: no rows
        return
    rows, width = shape_of(match["wide"])
    one_per_row = [rows]
    if shape_of(match["target"]) != (rows, 1) or (group.has_backward and not _is_one_hot(match)):
        return
    logits, target = write.viewed(match["logits"], (rows, width)), write.viewed(match["target"], one_per_row)
    results = (match["out"], match["maximum"], match["log_total"])
    _, top, log_total = write.replace(ours.cross_entropy.default, (logits, target), results)
    if group.has_backward:
        labels, scale = _labels(match), write.viewed(match["scale"], one_per_row)
        arguments = (logits, write.viewed(labels, one_per_row), top, log_total, scale, 0)
        write.replace(ours.cross_entropy_backward.default, arguments, (match["grad_logits"],))


def _linear_cross_entropy(write: GraphWriter, node: fx.Node) -> None:
    """The product in front of a cross-entropy joins it, where nobody else reads the logits."""
    product, target = unviewed(node.args[0]), node.args[1]
    if name_of(product) != "mm" or name_of(product.args[1]) != "permute" or product.args[1].args[1] != [1, 0]:
        return
    rows, weight = product.args[0], product.args[1].args[0]
    readers = readers_of(product)
    backward = [reader for reader in readers if reader.target is ours.cross_entropy_backward.default]
    products = [reader for one in backward for reader in readers_of(one)]
    of_weight = [one for one in products if name_of(one) == "mm" and _is_turned(one.args[0], backward)]
    of_rows = [one for one in products if name_of(one) == "mm" and unviewed(one.args[0]) in backward]
    found = len(backward), len(of_weight), len(of_rows), len(products)
    if {*readers} != {node, *backward} or found not in ((0, 0, 0, 0), (1, 1, 1, 2)):
        return
    if backward and (unviewed(of_weight[0].args[1]) is not unviewed(rows) or of_rows[0].args[1] is not weight):
        return
    out, maximum, log_of_total = (_item(node, index) for index in range(3))
    results = (maximum, None, None)
    top, total, picked = write.replace(ours.linear_cross_entropy.default, (rows, weight, target, 0), results, like=node)
    (log_total,) = write.replace(aten.log.default, (total,), (log_of_total,), like=node)
    shifted = write.made(aten.sub.Tensor, (picked, top), node)
    write.replace(aten.sub.Tensor, (shifted, log_total), (out,))
    if backward:
        _, labels, _, _, scale, _ = backward[0].args
        arguments = (rows, weight, labels, top, log_total, scale, 0)
        write.replace(ours.linear_cross_entropy_backward.default, arguments, (of_rows[0], of_weight[0]))


def _is_turned(value: Any, sources: Collection[fx.Node]) -> bool:
    """Whether a value is one of the matrices, transposed."""
    return name_of(value) == "permute" and value.args[1] == [1, 0] and unviewed(value.args[0]) in sources


def _is_one_hot(match: Match) -> bool:
    """Whether backward scatters -1 to the targets of the same block, times one number per row."""
    node, rows = match["scattered"], shape_of(match["wide"])[0]
    if name_of(node) != "scatter" or math.prod(shape_of(match["scale"])) != rows:
        return False
    base, dim, index, value = node.args[:4]
    is_zero = name_of(base) == "full" and base.args[1] == 0
    return bool(is_zero and dim in (1, -1) and value == -1 and shape_of(index) == (rows, 1))


def _labels(match: Match) -> fx.Node:
    found: fx.Node = match["scattered"].args[2]
    return found


def _item(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)


REWRITES: Mapping[str, Callable[[GraphWriter, FoundGroup], None]] = {
    "rms_norm": _rms_norm,
    "rms_norm of a narrow row": _rms_norm,
    "gated silu": _gated,
    "gated gelu": _gated,
    "gated gelu_tanh": _gated,
    "gelu by hand": _gelu_tanh,
    "rope": _rope,
    "rope_backward": _rope,
    "cross-entropy": _cross_entropy,
}
SINGLE: Mapping[str, tuple[Any, Callable[[GraphWriter, fx.Node], None]]] = {
    "layer_norm": (aten.native_layer_norm.default, _layer_norm),
    "linear_cross_entropy": (ours.cross_entropy.default, _linear_cross_entropy),
}
"""Kind -> the operator that its groups are found by, where no pattern says them."""

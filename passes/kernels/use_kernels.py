"""Replace groups of operators in a lowered program by the operators that have kernels (`runtime/kernels/registry.py`).

    h = add(a, b); n = mul(mul(h, rsqrt(add(mean(pow(h, 2), [-1], True), eps))), w)   + 12 operators in backward
        -->   n, h, rstd = autopar::add_rms_norm(a, b, w, eps)                        + 1 operator in backward

The groups are those of `kernel_patterns`; beside them a layer norm behind the addition of a residual, the addition to
the gradient of a norm, and packing around collectives. Every new value equals the one that it replaces up to rounding,
so backward reads the new values, and what only the old group kept for it is saved no more. All ranks replace the same.
A layer norm without an addition stays: torch's own operator is one kernel already.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ops import cross_entropy, gated, norms, packing  # noqa: F401 (two are only registered)
from autopar.ops.blocks import keeps_order, pieces_first, pieces_joined
from autopar.passes.kernels.found_groups import FoundGroup, found_groups
from autopar.passes.kernels.graph_patterns import Match, dtype_of, name_of, shape_of
from autopar.passes.kernels.graph_writer import GraphWriter, form_of

aten = torch.ops.aten
ours = torch.ops.autopar
Recomputed = Collection[str]


def use_kernels(graph_module: fx.GraphModule, recomputed: Recomputed, kinds: Collection[str]) -> fx.GraphModule:
    """Replace every group that a kernel of these kinds computes.

    recomputed: names of the operators that backward makes again; the addition of a residual joins the norm behind it
    only where both are, or neither is.
    """
    write = GraphWriter(graph_module.graph)
    for group in found_groups(graph_module.graph, kinds):
        REWRITES[group.pattern.name](write, group, recomputed)
    for node in list(graph_module.graph.nodes):
        kind, rewrite = SINGLE.get(node.target, ("", None))
        if rewrite is not None and kind in kinds:
            rewrite(write, node, recomputed)
    for node in reversed(graph_module.graph.nodes):
        if node.op == "call_function" and not node.users:
            graph_module.graph.erase_node(node)
    return graph_module


def _rms_norm(write: GraphWriter, group: FoundGroup, recomputed: Recomputed) -> None:
    match = group.match
    x = next((one for one in (match["x"], match["wide"]) if dtype_of(one) == dtype_of(match["out"])), None)
    if x is None or not _is_rms_norm(x, group):
        return
    x = write.current(x)
    weight, rstd = match["weight"], match["rstd"]
    summands = _summands(x, match["out"], recomputed)
    if summands is None:
        new = write.replace(ours.rms_norm.default, (x, weight, match["eps"]), (match["out"], rstd))
    else:
        arguments = (*summands, weight, match["eps"])
        new = write.replace(ours.add_rms_norm.default, arguments, (match["out"], x, rstd))
        x = new[1]
    if group.has_backward:
        arguments = (write.viewed(match["grad"], shape_of(x)), x, weight, new[-1])
        results, other = (match["grad_x"], match.values.get("grad_weight")), match["other"]
        if other is None:
            _norm_gradients(write, ours.rms_norm_backward.default, arguments, results)
        else:
            write.replace(ours.rms_norm_backward.default, (*arguments, other), results)


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


def _layer_norm(write: GraphWriter, node: fx.Node, recomputed: Recomputed) -> None:
    x, sizes, weight, bias, eps = node.args
    assert isinstance(x, fx.Node)
    summands = _summands(x, node, recomputed)
    if summands is None or weight is None or bias is None or not _is_one_row(x, sizes):
        return
    out, mean, rstd = (_item(node, index) for index in range(3))
    write.replace(ours.add_layer_norm.default, (*summands, weight, bias, eps), (out, x, mean, rstd))


def _layer_norm_backward(write: GraphWriter, node: fx.Node, recomputed: Recomputed) -> None:
    grad, x, sizes, mean, rstd, weight, bias, mask = node.args
    results = [_item(node, index) for index in range(3)]
    if weight is None or bias is None or not all(mask) or not _is_one_row(x, sizes):  # type: ignore[arg-type]  # a list
        return
    if results[0] is not None and _added(results) is not None:
        _norm_gradients(write, ours.layer_norm_backward.default, (grad, x, weight, mean, rstd), results)


def _is_one_row(x: Any, sizes: Any) -> bool:
    return len(sizes) == 1 and 0 < sizes[0] <= norms.LARGEST_ROW and shape_of(x)[-1] == sizes[0]


def _summands(x: fx.Node, norm: fx.Node, recomputed: Recomputed) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors whose sum is the row of a norm, where the kernel may add them."""
    if name_of(x) != "add" or len(x.args) != 2 or x.kwargs or x.meta["phase"] != norm.meta["phase"]:
        return None
    if (x.meta["operator"] in recomputed) != (norm.meta["operator"] in recomputed):
        return None
    first, second = x.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    alike = all(shape_of(one) == shape_of(x) and dtype_of(one) == dtype_of(x) for one in (first, second))
    return (first, second) if alike else None


def _norm_gradients(
    write: GraphWriter, target: Callable[..., Any], args: tuple[Any, ...], results: Sequence[fx.Node | None]
) -> None:
    """The gradients of a norm, with what is added to that of its row where that is all that reads it."""
    found = _added(results)
    if found is None:
        write.replace(target, (*args, None), results)
    else:
        total, other = found
        write.replace(target, (*args, other), (total, *results[1:]))


def _added(results: Sequence[fx.Node | None]) -> tuple[fx.Node, fx.Node] | None:
    """(sum, what is added to the gradient of the row), where the sum is the only reader of that gradient."""
    assert results[0] is not None
    row = form_of(results[0])
    total = next(iter(row.users), None)
    if total is None or len(row.users) != 1 or name_of(total) != "add" or len(total.args) != 2 or total.kwargs:
        return None
    other = next((one for one in total.args if one is not row), None)
    if not isinstance(other, fx.Node) or shape_of(other) != shape_of(row) or dtype_of(other) != dtype_of(row):
        return None
    readers = [user for vector in results[1:] if vector is not None for user in form_of(vector).users]
    return (total, other) if all(other < reader for reader in readers) else None


def _gated(write: GraphWriter, group: FoundGroup, recomputed: Recomputed) -> None:
    match, activation = group.match, group.pattern.name.removeprefix("gated ")
    gate, up = match["gate"], match["up"]
    if shape_of(gate) != shape_of(up) or dtype_of(gate) != dtype_of(up):
        return
    write.replace(ours.gated.default, (gate, up, activation), (match["out"],))
    if group.has_backward:
        arguments = (write.viewed(match["grad"], shape_of(gate)), gate, up, activation)
        write.replace(ours.gated_backward.default, arguments, (match["grad_gate"], match["grad_up"]))


def _gelu_tanh(write: GraphWriter, group: FoundGroup, recomputed: Recomputed) -> None:
    match, options = group.match, {"approximate": "tanh"}
    write.replace(aten.gelu.default, (match["x"],), (match["out"],), options)
    if group.has_backward:
        arguments = (write.viewed(match["grad"], shape_of(match["x"])), match["x"])
        write.replace(aten.gelu_backward.default, arguments, (match["grad_x"],), options)


def _cross_entropy(write: GraphWriter, group: FoundGroup, recomputed: Recomputed) -> None:
    match = group.match
    if len(shape_of(match["wide"])) != 2:  # classes per pixel: no rows
        return
    rows, width = shape_of(match["wide"])
    start, one_per_row = match["start"], [rows]
    if shape_of(match["target"]) != (rows, 1) or (group.has_backward and not _is_one_hot(match)):
        return
    logits, target = write.viewed(match["logits"], (rows, width)), write.viewed(match["target"], one_per_row)
    statistics = (logits, target, start)
    top, total, picked = write.replace(
        ours.cross_entropy_rows.default, statistics, (match["maximum"], None, None)
    )  # fmt: skip
    highest = write.viewed(match["top"], one_per_row)
    write.replace(cross_entropy.rescaled_total, (total, top, highest), (match["partial"],))
    log_total = write.viewed(match["log_total"], one_per_row)
    chosen = (picked, target, highest, log_total, start, width)
    write.replace(cross_entropy.log_probability, chosen, (match["out"],))
    if group.has_backward:
        labels, scale = _labels(match), write.viewed(match["scale"], one_per_row)
        arguments = (logits, write.viewed(labels, one_per_row), highest, log_total, scale, start)
        write.replace(ours.cross_entropy_backward.default, arguments, (match["grad_logits"],))


def _is_one_hot(match: Match) -> bool:
    """Whether backward scatters -1 to the targets of the same block, times one number per row."""
    node, rows = match["scattered"], shape_of(match["wide"])[0]
    if name_of(node) not in ("scatter", "masked_scatter") or math.prod(shape_of(match["scale"])) != rows:
        return False
    base, dim, index, value = node.args[:4]
    start = node.args[4] if name_of(node) == "masked_scatter" else 0
    is_zero = name_of(base) == "full" and base.args[1] == 0
    return bool(is_zero and dim in (1, -1) and value == -1 and start == match["start"] and shape_of(index) == (rows, 1))


def _labels(match: Match) -> fx.Node:
    found: fx.Node = match["scattered"].args[2]
    return found


def _pack(write: GraphWriter, node: fx.Node, recomputed: Recomputed) -> None:
    x: Any
    cuts: Any
    padded: Any
    x, cuts, padded = node.args
    if _is_one_copy(shape_of(x), cuts, padded):
        write.replace(ours.pack.default, (x, *cuts[0], padded[cuts[0][0]]), (node,))


def _unpack(write: GraphWriter, node: fx.Node, recomputed: Recomputed) -> None:
    cuts: Any
    padded: Any
    shape: Any
    y, cuts, padded, shape = node.args
    if _is_one_copy(tuple(shape), cuts, padded):
        dim = cuts[0][0]
        write.replace(ours.unpack.default, (y, *cuts[0], padded[dim], shape[dim]), (node,))


def _is_one_copy(shape: tuple[int, ...], cuts: Any, padded: Any) -> bool:
    """Whether a single cut moves elements, and nothing but its dim is padded."""
    if len(cuts) != 1 or (tuple(padded) == shape and keeps_order(padded, cuts)):
        return False
    return all(dim == cuts[0][0] or size == whole for dim, (size, whole) in enumerate(zip(shape, padded, strict=True)))


def _item(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)


REWRITES: Mapping[str, Callable[[GraphWriter, FoundGroup, Recomputed], None]] = {
    "rms_norm": _rms_norm,
    "gated silu": _gated,
    "gated gelu": _gated,
    "gated gelu_tanh": _gated,
    "gelu by hand": _gelu_tanh,
    "cross-entropy": _cross_entropy,
}
SINGLE: Mapping[Any, tuple[str, Callable[[GraphWriter, fx.Node, Recomputed], None]]] = {
    aten.native_layer_norm.default: ("layer_norm", _layer_norm),
    aten.native_layer_norm_backward.default: ("layer_norm", _layer_norm_backward),
    pieces_first: ("pack", _pack),
    pieces_joined: ("pack", _unpack),
}
"""Operator -> kind of kernel, and what puts it in the operator's place."""

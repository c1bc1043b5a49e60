"""Rules of operators whose dims depend on attributes or shapes: each function returns a string of the rule language.

    native_layer_norm over the last two dims  -->  "... [n0] [n1], [n0] [n1]?, ... -> ... [n0] [n1], ... 1 1, ... 1 1"

A function returns None when no split is known for this call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from autopar.rules.call import Call


def _blanks(prefix: str, count: int, whole: bool = False) -> str:
    """`count` dims named prefix0, prefix1, ..."""
    return " ".join(f"[{prefix}{i}]" if whole else f"{prefix}{i}" for i in range(count))


def _ones(count: int) -> str:
    return " ".join(["1"] * count)


def _attribute(call: Call, name: str) -> int:
    value = call.argument(name)
    assert isinstance(value, int)
    return value


def _to_copy(call: Call) -> str:
    output = call.outputs[0]
    linear = output is not None and output.dtype.is_floating_point
    return "... -> ... ; linear: x" if linear else "... -> ..."


def _expand(call: Call) -> str:
    """Dims that grow from 1, or that are new, have names of their own."""
    shape, output = call.operands[0].shape, call.outputs[0]
    assert output is not None
    new = len(output.shape) - len(shape)
    inner = ["1" if size == 1 else f"a{i}" for i, size in enumerate(shape)]
    outer = [f"x{i}" for i in range(new)]
    outer += [f"x{new + i}" if size == 1 else inner[i] for i, size in enumerate(shape)]
    return f"{' '.join(inner)} -> {' '.join(outer)} ; linear: x"


def _repeat(call: Call) -> str:
    """A repeated dim is (repetitions, size)."""
    repeats = call.argument("repeats")
    shape = call.operands[0].shape
    new = len(repeats) - len(shape)
    inner = [f"a{i}" for i in range(len(shape))]
    outer = [f"r{i}" for i in range(new)]
    outer += [f"(r{new + i} a{i})" for i in range(len(shape))]
    sizes = "".join(f" ; r{i} = {count}" for i, count in enumerate(repeats))
    return f"{' '.join(inner)} -> {' '.join(outer)} ; linear: x{sizes}"


def _constant_pad_nd(call: Call) -> str:
    pad, rank = call.argument("pad"), len(call.operands[0].shape)
    padded = {rank - 1 - i // 2 for i, amount in enumerate(pad) if amount}
    dims = " ".join("_" if dim in padded else f"a{dim}" for dim in range(rank))
    linear = " ; linear: x" if not call.argument("value") else ""
    return f"{dims} -> {dims}{linear}"


def _stack(call: Call) -> str:
    rank = len(call.operands[0].shape)
    at = _attribute(call, "dim") % (rank + 1)
    dims = [f"a{i}" for i in range(rank)]
    return f"{' '.join(dims)}* -> {' '.join([*dims[:at], '_', *dims[at:]])} ; linear: all"


def _select_scatter(call: Call) -> str:
    rank = len(call.operands[0].shape)
    at = _attribute(call, "dim") % rank
    dims = [f"a{i}" for i in range(rank)]
    whole = [*dims[:at], "_", *dims[at + 1 :]]
    return f"{' '.join(whole)}, {' '.join(dims[:at] + dims[at + 1 :])} -> {' '.join(whole)} ; linear: all"


def _layer_norm(call: Call) -> str:
    count = len(call.argument("normalized_shape"))
    n, ones = _blanks("n", count, whole=True), _ones(count)
    return f"... {n}, {n}?, {n}? -> ... {n}, ... {ones}, ... {ones}"


def _layer_norm_backward(call: Call) -> str:
    count = len(call.argument("normalized_shape"))
    n, ones = _blanks("n", count, whole=True), _ones(count)
    return f"... {n}, ... {n}, ... {ones}, ... {ones}, {n}?, {n}? -> ... {n}, {n}, {n}"


def _rms_norm(call: Call) -> str:
    count = len(call.argument("normalized_shape"))
    n = _blanks("n", count, whole=True)
    return f"... {n}, {n}? -> ... {n}, ... {_ones(count)}"


def _rms_norm_backward(call: Call) -> str:
    count = len(call.argument("normalized_shape"))
    n = _blanks("n", count, whole=True)
    return f"... {n}, ... {n}, ... {_ones(count)}, {n}? -> ... {n}, {n}"


def _embedding_backward(call: Call) -> str:
    """Scaling by frequency counts all ids, so these stay whole."""
    ids = "[...]" if call.argument("scale_grad_by_freq") else "..."
    return f"{ids} d, {ids} -> v d ; v: by masked_embedding_backward ; linear: x -"


def _along(call: Call, rank: int) -> int:
    return _attribute(call, "dim") % rank if rank else 0


def _elementwise_dims(shapes: Sequence[tuple[int, ...]], dim: int) -> list[str]:
    """Names of the dims in which all shapes agree, "_" for the others and for `dim`."""
    rank = len(shapes[0])
    agree = [len({shape[i] for shape in shapes}) == 1 for i in range(rank)]
    return [f"a{i}" if agree[i] and i != dim else "_" for i in range(rank)]


def _replaced(dims: Sequence[str], at: int, name: str) -> str:
    return " ".join([*dims[:at], name, *dims[at + 1 :]])


def _gather(call: Call) -> str:
    """The index may be split along `dim` as well (i); a split of the source (v) is masked."""
    source, index = (operand.shape for operand in call.operands)
    if not source:
        return "[...], [...] -> [...]"
    dim = _along(call, len(source))
    dims = _elementwise_dims([source, index], dim)
    left = _replaced(dims, dim, "_" if call.operands[0].dtype == torch.bool else "v")
    right = _replaced(dims, dim, "i")
    return f"{left}, {right} -> {right} ; v: sum by masked_gather ; linear: x -"


def _scatter(call: Call) -> str:
    """scatter.value, scatter.src, scatter_add: the written dim is split by masking the positions of other blocks."""
    shapes = [operand.shape for operand in call.operands]
    if not shapes[0]:
        return "[...]* -> [...]"
    dim = _along(call, len(shapes[0]))
    dims = _elementwise_dims(shapes, dim)
    written, index = _replaced(dims, dim, "v"), " ".join(dims)
    sources = f", {index}" if len(shapes) > 2 else ""
    return f"{written}, {index}{sources} -> {written} ; v: by masked_scatter ; linear: x - x"


def _index_select(call: Call) -> str:
    rank = len(call.operands[0].shape)
    dims = [f"a{i}" for i in range(rank)]
    dim = _along(call, rank)
    return f"{_replaced(dims, dim, '_')}, i -> {_replaced(dims, dim, 'i')} ; linear: x -"


RULE_FUNCTIONS: Mapping[str, Callable[[Call], str | None]] = {
    "aten._to_copy": _to_copy,
    "aten.expand": _expand,
    "aten.repeat": _repeat,
    "aten.constant_pad_nd": _constant_pad_nd,
    "aten.stack": _stack,
    "aten.select_scatter": _select_scatter,
    "aten.native_layer_norm": _layer_norm,
    "aten.native_layer_norm_backward": _layer_norm_backward,
    "aten._fused_rms_norm": _rms_norm,
    "aten._fused_rms_norm_backward": _rms_norm_backward,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.gather": _gather,
    "aten.scatter.value": _scatter,
    "aten.scatter.src": _scatter,
    "aten.scatter_add": _scatter,
    "aten.index_select": _index_select,
}

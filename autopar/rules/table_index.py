"""Rules of operators that read or write by position: gather, scatter, index, index_put, embedding backward.

The dim that positions point into is split (name v) by masking the positions of other blocks; where positions point
into several dims at once, these stay whole. Writes that add may split the positions (i): every rank adds its own, and
only the first coordinate keeps what stood there before, so that the sum counts it once.

    index_add(x[v, d], 0, index[i], source[i, d])  -->  x with i split in 2: rank 0 holds x + its rows, rank 1 its rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from autopar.rules.call import Call, TensorSpec


def _embedding_backward(call: Call) -> str:
    """Scaling by frequency counts all ids, so these stay whole."""
    ids = "[...]" if call.argument("scale_grad_by_freq") else "..."
    return f"{ids} d, {ids} -> v d ; v: by masked_embedding_backward ; linear: x -"


def _elementwise_dims(shapes: Sequence[tuple[int, ...]], dim: int) -> list[str]:
    """Names of the dims in which all shapes agree, "_" for the others and for `dim`."""
    agree = [len(set(sizes)) == 1 for sizes in zip(*shapes, strict=True)]
    return [f"a{i}" if same and i != dim else "_" for i, same in enumerate(agree)]


def _replaced(dims: Sequence[str], at: int, name: str) -> str:
    return " ".join([*dims[:at], name, *dims[at + 1 :]])


def _gather(call: Call) -> str:
    """The index may be split along `dim` as well (i)."""
    source, index = call.operands
    if not source.shape:
        return "[...], [...] -> [...]"
    dim = call.argument("dim") % len(source.shape)
    dims = _elementwise_dims([source.shape, index.shape], dim)
    read = _replaced(dims, dim, _if_summable(source, "v"))
    right = _replaced(dims, dim, "i")
    return f"{read}, {right} -> {right} ; v: sum by masked_gather ; linear: x -"


def _if_summable(source: TensorSpec, name: str) -> str:
    """Masked reads leave Partial(sum), which bools have not."""
    return "_" if source.dtype == torch.bool else name


def _scatter(call: Call) -> str:
    """scatter.value and scatter.src."""
    shapes = [operand.shape for operand in call.operands]
    if not shapes[0]:
        return "[...], [...], [...]? -> [...]"
    dim = call.argument("dim") % len(shapes[0])
    dims = _elementwise_dims(shapes, dim)
    written, index = _replaced(dims, dim, "v"), " ".join(dims)
    return f"{written}, {index}, {index}? -> {written} ; v: by masked_scatter ; linear: x - x"


def _scatter_add(call: Call) -> str:
    """Positions may be split where every one has a value (i)."""
    shapes = [operand.shape for operand in call.operands]
    if not shapes[0]:
        return "[...], [...], [...] -> [...]"
    dim = call.argument("dim") % len(shapes[0])
    dims = _elementwise_dims(shapes, dim)
    added = _replaced(dims, dim, "i" if shapes[1][dim] == shapes[2][dim] else "_")
    written = _replaced(dims, dim, "v")
    effects = "v: by masked_scatter_add ; i: sum by masked_scatter_add ; linear: x - x"
    return f"{written}, {added}, {added} -> {written} ; {effects}"


def _scatter_reduce(call: Call) -> str:
    """The largest (smallest) of all values per position needs each rank's positions only."""
    shapes = [operand.shape for operand in call.operands]
    if not shapes[0]:
        return "[...], [...], [...]? -> [...]"
    dim = call.argument("dim") % len(shapes[0])
    dims = _elementwise_dims(shapes, dim)
    extreme = {"amax": "max", "amin": "min"}.get(call.argument("reduce"))
    keeps = call.target is not torch.ops.aten.scatter_reduce.two or call.argument("include_self")
    may_split = extreme is not None and keeps and shapes[1][dim] == shapes[-1][dim]
    added = _replaced(dims, dim, "i" if may_split else "_")
    return f"{' '.join(dims)}, {added}, {added}? -> {' '.join(dims)} ; i: {extreme or 'sum'}"


def _index_select(call: Call) -> str:
    source = call.operands[0]
    dims = [f"a{i}" for i in range(len(source.shape))]
    dim = call.argument("dim") % len(dims)
    read = _replaced(dims, dim, _if_summable(source, "v"))
    return f"{read}, i -> {_replaced(dims, dim, 'i')} ; v: sum by masked_index_select ; linear: x -"


def _index_write(effects: str, position: str) -> Callable[[Call], str]:
    """index_add, index_copy and index_fill: one position per row of the source, if there is one."""

    def rule(call: Call) -> str:
        shape = call.operands[0].shape
        if not shape:
            return "[...], [...], [...]? -> [...]"
        dims = [f"a{i}" for i in range(len(shape))]
        dim = call.argument("dim") % len(dims)
        has_rows = len(call.operands) == 3 and call.operands[2].shape != ()
        source = f", {_replaced(dims, dim, position)}" if has_rows else ", [...]?"
        written = _replaced(dims, dim, "v")
        at = position if call.operands[1].shape else "[...]"
        return f"{written}, {at}{source} -> {written} ; {effects}"

    return rule


def _index(call: Call) -> str | None:
    """`x[:, i, j]`: dims of the broadcast positions appear where the first of them stands, or in front."""
    source, indices = call.operands[0], call.argument("indices")
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return None
    read, positions, result = _indexing(source, indices, _if_summable(source, "v"), "i")
    operands = ", ".join([read, *positions])
    return f"{operands} -> {result} ; v: sum by masked_index ; linear: x{' -' * len(positions)}"


def _index_put(call: Call) -> str | None:
    """Values broadcast to the shape that reading at the positions has. Added positions may be split, others are
    written by every rank."""
    source, values, indices = call.operands[0], call.operands[-1], call.argument("indices")
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return _masked_put(source, values, indices)
    accumulates = bool(call.argument("accumulate"))
    written, positions, result = _indexing(source, indices, "v", "i" if accumulates else None)
    operands = ", ".join([written, *positions, _broadcast_to(result.split(), values)])
    added = "".join(f" ; {name}: sum by masked_index_put" for name in _position_names(result)) if accumulates else ""
    return f"{operands} -> {written} ; v: by masked_index_put{added} ; linear: x{' -' * len(positions)} x"


def _position_names(result: str) -> list[str]:
    return [name for name in result.split() if name.startswith("i")]


def _broadcast_to(dims: Sequence[str], values: TensorSpec) -> str:
    """Dims of values that broadcast to `dims`; "[...]" for a single value."""
    last = dims[len(dims) - len(values.shape) :]
    return " ".join("1" if size == 1 else dim for dim, size in zip(last, values.shape, strict=True)) or "[...]"


def _masked_put(source: TensorSpec, values: TensorSpec, indices: Sequence[TensorSpec | None]) -> str | None:
    """`x[mask] = value` has a static shape where the value does not depend on the number of True."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    mask = indices[given[0]]
    if len(given) != 1 or mask is None:
        return None
    dims = [f"a{i}" for i in range(len(source.shape))]
    first, last = given[0], given[0] + len(mask.shape)
    result = [*dims[:first], "_", *dims[last:]]
    at = first - len(result) + len(values.shape)
    if at >= 0 and values.shape[at] != 1:
        return None
    return f"{' '.join(dims)}, {' '.join(dims[first:last])}, {_broadcast_to(result, values)} -> {' '.join(dims)}"


def _indexing(
    source: TensorSpec, indices: Sequence[TensorSpec | None], split_dim: str, position: str | None
) -> tuple[str, list[str], str]:
    """(dims of the source, dims of each index tensor, dims of the result of reading).

    `split_dim` names the indexed dim if there is one only; `position` is the prefix of the dims of the positions
    (None: they stay whole).
    """
    given = [dim for dim, index in enumerate(indices) if index is not None]
    dims = [f"a{i}" for i in range(len(source.shape))]
    for dim in given:
        dims[dim] = split_dim if len(given) == 1 else "_"
    rank = max(len(index.shape) for index in indices if index is not None)
    names = [f"{position}{i}" if position else "_" for i in range(rank)]
    positions = [
        " ".join("1" if size == 1 else name for name, size in zip(names[rank - len(i.shape) :], i.shape, strict=True))
        for i in indices
        if i is not None
    ]
    adjacent = given == list(range(given[0], given[-1] + 1))
    rest = [name for dim, name in enumerate(dims) if dim not in given]
    at = given[0] if adjacent else 0
    return " ".join(dims), positions, " ".join([*rest[:at], *names, *rest[at:]])


def _searchsorted(call: Call) -> str:
    """Rows of boundaries belong to rows of values; a single row serves all values."""
    boundaries = call.operands[0]
    sorter = ", ... _" if len(call.operands) == 3 else ""
    if len(boundaries.shape) == 1:
        return f"[...], ...{sorter and ', [...]'} -> ..."
    return f"... _, ... t{sorter} -> ... t"


INDEX_RULES: Mapping[str, Callable[[Call], str | None]] = {
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.gather": _gather,
    "aten.scatter.value": _scatter,
    "aten.scatter.src": _scatter,
    "aten.scatter_add": _scatter_add,
    "aten.scatter_reduce.two": _scatter_reduce,
    "aten.scatter.reduce": _scatter_reduce,
    "aten.scatter.value_reduce": _scatter_reduce,
    "aten.index_select": _index_select,
    "aten.index_add": _index_write("v: by masked_index_add ; i: sum by masked_index_add ; linear: x - x", "i"),
    "aten.index_copy": _index_write("v: by masked_index_copy ; linear: x - x", "_"),
    "aten.index_fill": _index_write("v: by masked_index_fill", "_"),
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put": _index_put,
    "aten._unsafe_index_put": _index_put,
    "aten.searchsorted.Tensor": _searchsorted,
}

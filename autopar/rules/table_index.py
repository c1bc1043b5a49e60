"""Rules of operators that read or write by position: gather, scatter, index, index_put, embedding backward.

The dim that positions point into is split (name v) by masking the positions of other blocks; where positions point
into several dims at once, these stay whole.
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
    """scatter.value, scatter.src and scatter_add."""
    shapes = [operand.shape for operand in call.operands]
    if not shapes[0]:
        return "[...], [...], [...]? -> [...]"
    dim = call.argument("dim") % len(shapes[0])
    dims = _elementwise_dims(shapes, dim)
    written, index = _replaced(dims, dim, "v"), " ".join(dims)
    return f"{written}, {index}, {index}? -> {written} ; v: by masked_scatter ; linear: x - x"


def _index_select(call: Call) -> str:
    source = call.operands[0]
    dims = [f"a{i}" for i in range(len(source.shape))]
    dim = call.argument("dim") % len(dims)
    read = _replaced(dims, dim, _if_summable(source, "v"))
    return f"{read}, i -> {_replaced(dims, dim, 'i')} ; v: sum by masked_index_select ; linear: x -"


def _index_add(call: Call) -> str:
    dims = [f"a{i}" for i in range(len(call.operands[0].shape))]
    dim = call.argument("dim") % len(dims)
    whole = _replaced(dims, dim, "_")
    return f"{whole}, _, {whole} -> {whole} ; linear: x - x"


def _index(call: Call) -> str | None:
    """`x[:, i, j]`: dims of the broadcast positions appear where the first of them stands, or in front."""
    source, indices = call.operands[0], call.argument("indices")
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return None
    read, positions, result = _indexing(source, indices, _if_summable(source, "v"), "i")
    operands = ", ".join([read, *positions])
    return f"{operands} -> {result} ; v: sum by masked_index ; linear: x{' -' * len(positions)}"


def _index_put(call: Call) -> str | None:
    """Values broadcast to the shape that reading at the positions has; all positions are written by every rank."""
    source, values, indices = call.operands[0], call.operands[-1], call.argument("indices")
    if any(index is not None and index.dtype == torch.bool for index in indices):
        return None
    written, positions, result = _indexing(source, indices, "v", None)
    dims = result.split()
    dims = dims[len(dims) - len(values.shape) :]
    sources = " ".join("1" if size == 1 else dim for dim, size in zip(dims, values.shape, strict=True))
    operands = ", ".join([written, *positions, sources])
    return f"{operands} -> {written} ; v: by masked_index_put ; linear: x{' -' * len(positions)} x"


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


INDEX_RULES: Mapping[str, Callable[[Call], str | None]] = {
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.gather": _gather,
    "aten.scatter.value": _scatter,
    "aten.scatter.src": _scatter,
    "aten.scatter_add": _scatter,
    "aten.index_select": _index_select,
    "aten.index_add": _index_add,
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put": _index_put,
    "aten._unsafe_index_put": _index_put,
}

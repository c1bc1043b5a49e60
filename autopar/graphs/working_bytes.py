"""Working bytes: what a computation of ours holds while it runs, beside what it reads and returns.

    normalise_batch of a block of 64 MiB in bf16         128 MiB, its difference to the mean in float32
    mm_fp8_rowwise of 64 MiB and 32 MiB in bf16           48 MiB, both operands in float8
    attention_block_backward of 8 MiB in bf16             48 MiB, what its blocks add up to in float32
    linear_cross_entropy of 32768 rows and 50257 words    393 MiB, the logits of 4096 rows in bf16
    tiled_mlp of 131072 rows, hidden width 14336         336 MiB, three hidden tensors of 4096 rows in bf16
    ctc_loss_backward of 16 x 1000 steps, 100 targets      25 MiB, two tables of the recursion in float32

Norms over a split batch are written in torch, and widen their block; pieces of uneven dims are padded, joined and cut;
a causal attention over a part of a sequence is several blocks, which are joined.
How much they hold at once is found by running them on the meta device, where nothing is computed. Torch's own kernels,
and Triton's, widen in registers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.graphs.operator_names import FLOAT8_PRODUCTS, argument_names, base_name
from autopar.graphs.symmetric_sizes import symmetric_sizes
from autopar.ops import blocks, group_statistics, norms, rows, split_statistics, statistics
from autopar.ops.attention_operator import attention_backward_by_index, attention_by_index
from autopar.ops.cross_entropy import cross_entropy_rows
from autopar.ops.ctc import buffers_of_backward, buffers_of_loss
from autopar.ops.linear_cross_entropy import gradients_in_chunks, rows_in_chunks
from autopar.ops.ring_attention import attention_block, attention_block_backward
from autopar.ops.symmetric_products import SYMMETRIC
from autopar.ops.tiled_mlp import tiled_mlp_backward_reference, tiled_mlp_reference

WRITTEN_IN_TORCH = frozenset({
    blocks.pieces_first,
    blocks.pieces_joined,
    statistics.channel_sums,
    statistics.centred_squares,
    statistics.normalise_batch,
    statistics.batch_norm_gradient_sums,
    statistics.batch_norm_gradients,
    group_statistics.group_sums,
    group_statistics.group_squares,
    group_statistics.normalise_groups,
    group_statistics.group_gradient_sums,
    group_statistics.group_norm_gradients,
    rows.row_squares,
    rows.rms_norm_block,
    rows.layer_norm_block,
    rows.norm_gradient_sums,
    rows.norm_gradients,
    norms.gradient_block,
    split_statistics.squares,
    split_statistics.exponentials,
    split_statistics.power,
    attention_by_index,
    attention_backward_by_index,
    attention_block,
    attention_block_backward,
})  # fmt: skip
"""Functions that make values as large as their block."""


def _nothing(*_: Any) -> None:
    """A kernel in place."""


WITH_BUFFERS: Mapping[str, Callable[..., Any]] = {
    "linear_cross_entropy": partial(rows_in_chunks, statistics=cross_entropy_rows),
    "linear_cross_entropy_backward": partial(gradients_in_chunks, overwrite=_nothing),
    "tiled_mlp": tiled_mlp_reference,
    "tiled_mlp_backward": tiled_mlp_backward_reference,
    "ctc_loss": buffers_of_loss,
    "ctc_loss_backward": buffers_of_backward,
}
"""Operators with buffers of their own: what makes these, kernels left out."""


def working_bytes(node: fx.Node) -> int:
    """Most bytes that a node of a lowered graph holds beyond its operands and results; 0 for what is a kernel, and for
    helpers whose operands were not described."""
    if node.target in SYMMETRIC:
        return symmetric_sizes(node).working_bytes
    if base_name(node.target) in FLOAT8_PRODUCTS:
        return sum(_rounded_bytes(operand) for operand in node.all_input_nodes)
    written = _written(node.target)
    if written is None or not all(map(_is_described, node.all_input_nodes)) or _drops(node):
        return 0
    return _measured(written, _frozen(_alike(node)), _frozen(tuple(node.kwargs.items())))


def _alike(node: fx.Node) -> tuple[Any, ...]:
    """The arguments without a salt, by which the draws of equal layers differ."""
    names = argument_names(node.target)
    if "salt" not in names:
        return node.args
    return tuple(0 if name == "salt" else value for name, value in zip(names, node.args, strict=False))


@cache
def _written(target: Any) -> Callable[..., Any] | None:
    """What makes the values that a call holds meanwhile; None for a kernel."""
    return WITH_BUFFERS.get(base_name(target), target if target in WRITTEN_IN_TORCH else None)


def _is_described(operand: fx.Node) -> bool:
    return "local_shape" in operand.meta and "dtype" in operand.meta


def _drops(node: fx.Node) -> bool:
    """Whether an attention drops weights: on CUDA a kernel of ours computes it, without blocks."""
    names = argument_names(node.target)
    return "dropout_p" in names and bool(node.args[names.index("dropout_p")])


def _rounded_bytes(operand: fx.Node) -> int:
    """Of a matrix in float8: a byte an element."""
    return math.prod(operand.meta["local_shape"]) if "local_shape" in operand.meta else 0


@cache
def _measured(function: Any, args: Any, kwargs: Any) -> int:
    given, named = _thawed(args), dict(_thawed(kwargs))
    held = _Held()
    with held:
        results = function(*given, **named)
    return held.most - held.bytes_of(results)


class _Held(TorchDispatchMode):
    """The most bytes that are made while it is active and live at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        for storage in (tensor.untyped_storage() for tensor in _tensors(result)):
            if id(storage) not in self._living and id(storage) not in given:
                self._living[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._living.pop, id(storage), None)
        self.most = max(self.most, sum(self._living.values()))
        return result

    def bytes_of(self, results: Any) -> int:
        """Of those that were made here."""
        made = {id(tensor.untyped_storage()) for tensor in _tensors(results)}
        return sum(self._living.get(key, 0) for key in made)


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _frozen(value: Any) -> Hashable:
    """Arguments as a key: a node by its form."""
    if isinstance(value, fx.Node):
        return ("tensor", tuple(value.meta["local_shape"]), value.meta["dtype"])
    if isinstance(value, tuple | list):
        return tuple(map(_frozen, value))
    return value  # type: ignore[no-any-return]


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple) and value[:1] == ("tensor",):
        return torch.empty(value[1], dtype=value[2], device="meta")
    return tuple(map(_thawed, value)) if isinstance(value, tuple) else value

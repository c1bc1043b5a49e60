"""Saved in less room: what a plan saves in a form is made small behind its producer, and large again in backward.

    forward(x)          y = relu(mm(x, w));  bits = pack_bits(y)              saves bits, 1 bit a value; y ends here
    backward(bits, dy)  y_bits = unpack_bits(bits);  d = threshold_backward(dy, y_bits, 0)

    forward(x, seed)    h = gelu(a);  kept = rounded_by_index(h, 4, seed, ...)     saves kept
    backward(kept, dy)  h = unround_groups(kept, 4);  dw = mm(dy^T, h)

A form is made of one node that is saved, and read in front of the first call that wants it. A rounded value of which
some readers ask for the sign alone is saved twice, rounded and as bits. What the form does not fit (statistics, what a
pass put in the place of the operator) stays as it is. Words are drawn by the index in the global tensor, under a salt
of the operator's name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.graphs.backward_readers import reading
from autopar.graphs.forward_backward import Partition, SavedTensor
from autopar.graphs.node_values import VIEWS, is_getitem
from autopar.layouts.placement import Mesh, local_runs
from autopar.ops.random_index import Runs, full_runs
from autopar.ops.saved_forms import packed_bytes, rounded_by_index, rounded_bytes
from autopar.plans.plan_value import MASK, ROUNDED_BITS
from autopar.program import returned_values

_ours = torch.ops.autopar
OWN_SALTS = 1 << 31
"""From here on; those of the model are counted from 0."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A value in one form, and who reads it in backward. bits: 1 as flags."""

    bits: int
    readers: Collection[fx.Node]


def with_saved_forms(
    partition: Partition, forms: Mapping[str, str], mesh: Mesh, coordinate: Sequence[int], seed: str
) -> Partition:
    """The graphs, which are written into, with what operators save in the forms that are said.

    forms: operator -> form. seed: the name of that placeholder of forward.
    """
    if not forms or partition.backward is None:
        return partition
    graph, backward = partition.forward.graph, partition.backward.graph
    returned = returned_values(graph)
    first = len(returned) - len(partition.saved)
    taken = [node for node in backward.nodes if node.op == "placeholder"]
    drawn_from = next((node for node in graph.nodes if node.op == "placeholder" and node.name == seed), None)
    values, saved = list[Any](), list[SavedTensor]()
    for value, entry, place in zip(returned[first:], partition.saved, taken, strict=False):
        pieces = [] if entry.is_input else list(_pieces(value, place, forms.get(str(value.meta.get("operator")))))
        for piece in pieces:
            kept = _kept(value, piece.bits, drawn_from, mesh, coordinate)
            _read_again(place, kept, piece)
            values.append(kept)
            saved.append(replace(entry, bytes=math.prod(kept.meta["local_shape"])))
        if pieces:
            backward.erase_node(place)
        else:
            values.append(value)
            saved.append(entry)
    graph.output_node().args = ((*returned[:first], *values),)
    for module in partition.graphs:
        module.recompile()
    return replace(partition, saved=tuple(saved))


def _pieces(value: fx.Node, place: fx.Node, form: str | None) -> list[_Piece]:
    """In what a value is saved; nothing where it stays as it is."""
    dtype, users = value.meta.get("dtype"), list(place.users)
    if form is None or not isinstance(dtype, torch.dtype) or any(user.op == "output" for user in users):
        return []
    if dtype == torch.bool:
        return [_Piece(1, users)]
    if not dtype.is_floating_point:
        return []
    signs = [user for user in users if _asks_for_sign(user, place)]
    others = [user for user in users if user not in signs]
    if not others:
        return [_Piece(1, signs)]
    if form == MASK or _source(value).meta.get("output") != 0:
        return []
    return [_Piece(ROUNDED_BITS[form], others)] + ([_Piece(1, signs)] if signs else [])


def _asks_for_sign(user: fx.Node, value: fx.Node) -> bool:
    """Whether a reader, or all who read what it moves, ask for no more."""
    if user.target in VIEWS or user.meta.get("redistributes") is not None:
        return bool(user.users) and all(_asks_for_sign(behind, user) for behind in user.users)
    places = [place for place, argument in enumerate(user.args) if argument is value]
    return bool(places) and all(reading(user, place) in ("sign", "shape") for place in places)


def _source(node: fx.Node) -> fx.Node:
    """The node whose value a redistribution moves."""
    while node.meta.get("redistributes") is not None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _kept(value: fx.Node, bits: int, seed: fx.Node | None, mesh: Mesh, coordinate: Sequence[int]) -> fx.Node:
    """A value made small, behind the node that makes it."""
    count = math.prod(value.meta["local_shape"])
    behind = value.next
    while is_getitem(behind):  # what an operator with several makes stays together
        behind = behind.next
    with value.graph.inserting_before(behind):
        if bits == 1:
            node = value.graph.call_function(_ours.pack_bits.default, (value,))
        else:
            assert seed is not None, f"{value}: what is rounded by chance needs a seed"
            runs, shape = _place(value, mesh, coordinate)
            salt = OWN_SALTS + zlib.crc32(str(value.meta["operator"]).encode()) % OWN_SALTS
            node = value.graph.call_function(rounded_by_index, (value, bits, seed, salt, runs, shape))
    nbytes = packed_bytes(count) if bits == 1 else rounded_bytes(count, bits)
    node.meta = _meta(value, (nbytes,), torch.uint8)
    return node


def _place(value: fx.Node, mesh: Mesh, coordinate: Sequence[int]) -> tuple[Runs, tuple[int, ...]]:
    """(runs, global shape) of the block; what lies as no layout says is numbered by itself."""
    copy = value.meta.get("redistributes")
    layout = value.meta.get("layout") if copy is None else copy.layout
    shape, local = _source(value).meta.get("global_shape"), tuple(value.meta["local_shape"])
    if layout is not None and shape is not None:
        runs = tuple(local_runs(size, layout, dim, mesh, coordinate) for dim, size in enumerate(shape))
        if tuple(sum(length for _, length in dim) for dim in runs) == local:
            return runs, tuple(shape)
    return full_runs(local), local


def _read_again(place: fx.Node, kept: fx.Node, piece: _Piece) -> None:
    """What backward takes in a form, and the value in front of the first of its readers, to these."""
    graph, dtype, size = place.graph, place.meta["dtype"], list(place.meta["local_shape"])
    with graph.inserting_before(place):
        taken = graph.placeholder(place.name)
    taken.meta = _meta(place, tuple(kept.meta["local_shape"]), torch.uint8)
    if not piece.readers:
        return
    first = min(piece.readers)
    with graph.inserting_before(first):
        if piece.bits == 1:
            node = graph.call_function(_ours.unpack_bits.default, (taken, size, dtype))
        else:
            node = graph.call_function(_ours.unround_groups.default, (taken, piece.bits, size, dtype))
    node.meta = {**place.meta, "phase": "backward"}
    node.meta.pop("redistributes", None)
    for reader in piece.readers:
        reader.replace_input_with(place, node)


def _meta(like: fx.Node, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {"local_shape": shape, "dtype": dtype, "phase": like.meta["phase"], "operator": like.meta["operator"]}

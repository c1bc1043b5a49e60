"""Operators that treat every row alike: permuted rows in, equally permuted rows out.

    y = mul(silu(g), u)   (T, H)         rows of g and u             y (T, H) has rows
    v = reshape(y, [T, 2, H / 2])        rows of y                   v (T, 2, H / 2) has rows
    b = sum(y, [0])       (H,)           rows of y, in any order     b has none
    p, q = gated_backward(dy, g, u)      rows of all three           both have rows, and so has the pair

What rows an operator reads is its sharding rule's to say: where a plain call on a rank's block is right for every split
of the rows, each row stands for itself. Rows are dim 0.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.graphs.node_values import VIEWS, describe_values
from autopar.rules.engine import RESHAPES, rule_for, tensor_operands
from autopar.rules.rule import Rule, Tensor

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RowWise:
    """operands: those whose rows are permuted; the others stay as they are, as constants do, whose rows are all alike.
    returns_rows: whether the result has rows."""

    operands: tuple[fx.Node, ...]
    returns_rows: bool


def row_wise(node: fx.Node, rows: int) -> RowWise | None:
    """How a node of a lowered graph treats `rows` (more than one) rows; None where it looks at their order."""
    if node.op != "call_function" or "redistributes" in node.meta:
        return None
    if node.target is operator.getitem:
        return _of_several(node, rows)
    near = [*node.all_input_nodes, node]
    if not all({"val", "local_shape"} & one.meta.keys() for one in near):
        return None
    describe_values(near)
    value = node.meta["val"]
    if not (isinstance(value, torch.Tensor) or _are_tensors(value)):
        return None
    if node.target in VIEWS or node.target in RESHAPES:
        found = RowWise(tuple(node.all_input_nodes), True) if _keeps_rows(node, rows) else None
    else:
        rule = rule_for(node)
        found = None if rule is None else _by_rule(rule, tensor_operands(node), rows)
    if found is None:
        return None
    return replace(found, operands=tuple(one for one in found.operands if one.target is not _aten.full.default))


def _of_several(item: fx.Node, rows: int) -> RowWise | None:
    """One output of a call of which every output has rows."""
    (call,) = item.all_input_nodes
    how = row_wise(call, rows)
    return RowWise((call,), True) if how is not None and how.returns_rows and _are_tensors(call.meta["val"]) else None


def _are_tensors(value: object) -> bool:
    """Whether a call returns several tensors, all of them there."""
    return isinstance(value, tuple | list) and all(isinstance(one, torch.Tensor) for one in value)


def _keeps_rows(view: fx.Node, rows: int) -> bool:
    """Whether dim 0 is the rows before and after a view."""
    before, after = view.all_input_nodes[0].meta["val"].shape, view.meta["val"].shape
    if before[:1] != (rows,) or after[:1] != (rows,) or 0 in before:
        return False
    if view.target is _aten.expand.default:
        return len(before) == len(after)
    if view.target is _aten.permute.default:
        dims = view.args[1]
        assert isinstance(dims, list | tuple)
        return tuple(dims)[:1] == (0,)
    return True


def _by_rule(rule: Rule, operands: list[fx.Node], rows: int) -> RowWise | None:
    names = {name for tensor in rule.inputs if (name := _first(tensor)) is not None and rule.sizes[name] == rows}
    if len(names) != 1:
        return None
    (name,) = names
    tensors = (*rule.inputs, *(output for output in rule.outputs if output is not None))
    elsewhere = any(name in dim for tensor in tensors for dim in tensor[1:])
    if elsewhere or name in rule.implementations or name in rule.synchronised_bytes or name in rule.exchanged_bytes:
        return None
    with_rows = [_first(tensor) == name for tensor in rule.inputs]
    read = tuple(one for one, has in zip(operands, with_rows, strict=True) if has)
    if any(one in read for one, has in zip(operands, with_rows, strict=True) if not has):
        return None
    returned = [output is not None and _first(output) == name for output in rule.outputs]
    reduced = name in rule.reductions and all(kind is not None for kind in rule.reductions[name])
    return RowWise(read, returned[0]) if all(returned) or (len(returned) == 1 and reduced) else None


def _first(tensor: Tensor) -> str | None:
    """The name of dim 0, where it has one factor with a name."""
    return tensor[0][0] if tensor and len(tensor[0]) == 1 else None

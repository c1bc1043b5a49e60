"""Copies of tokens: rows that are k of each token, and sums that add k rows of each token up.

    rows = reshape(expand(x, [T, 2, D]), [2 T, D])        copied_tokens(rows)            x, 2
    v = reshape(y, [T, 2, N]);  z = sum(v, 1)             token_sums(v, y, 2)            [z]; None where others read v

A token that some experts of one rank want travels there once, and what comes of it is added up before it goes back.
"""

from __future__ import annotations

from torch import fx

from autopar.graphs.operator_names import base_name
from autopar.passes.kernels.graph_patterns import shape_of
from autopar.rules.engine import RESHAPES


def copied_tokens(value: fx.Node) -> tuple[fx.Node, int] | None:
    """Of a value whose rows are k copies of each token: what is expanded, (..., 1, D), and k; else None."""
    (_, *row), copies = shape_of(value), value
    while copies.target in RESHAPES or base_name(copies.target) == "clone":
        copies = copies.all_input_nodes[0]
    if base_name(copies.target) != "expand":
        return None
    (tokens,) = copies.all_input_nodes
    before, after = shape_of(tokens), shape_of(copies)
    at = len(after) - len(row) - 1
    if at < 0 or list(after[at + 1 :]) != row or before != (*after[:at], 1, *row):
        return None
    return tokens, after[at]


def token_sums(reader: fx.Node, rows: fx.Node, each: int) -> list[fx.Node] | None:
    """The sums over `each` rows of a token that a reader of rows (T each, N) is read by; None where it is read by
    anything else."""
    if reader.target not in RESHAPES:
        return None
    (_, *row), shape = shape_of(rows), shape_of(reader)
    at = len(shape) - len(row) - 1
    if at < 1 or list(shape[at:]) != [each, *row]:
        return None
    is_sum = reader.users and all(_adds_over(user, at, len(shape)) for user in reader.users)
    return list(reader.users) if is_sum else None


def _adds_over(node: fx.Node, dim: int, ndim: int) -> bool:
    dims = node.args[1] if len(node.args) > 1 else None
    return base_name(node.target) == "sum" and not node.kwargs and dims in ([dim], [dim - ndim])

"""Collectives in a lowered graph: which nodes start them, which wait for them, and what only lays data out around them.

    x = contiguous(g)      light          the way into a collective: `prepared from` g
    y = all_reduce(x)      start
    z = wait_tensor(y)     wait, late     nothing but a wait, and light nodes behind it: may stand as late as its reader
    w = trimmed(z)         light, late

`describe` reads this from one graph. What it says is the same on every rank: the nodes that some ranks have and others
do not (padding, regions of uneven blocks) are light.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from autopar.graphs.copy_nodes import COPY_FROM_HOST, WAIT_COPY
from autopar.ops import packing  # noqa: F401 (registers pack and unpack)
from autopar.ops.blocks import padded, piece, pieces_first, pieces_joined, region, trimmed
from autopar.ops.buckets import packed, packed_rows, rows_part
from autopar.ops.row_chunks import rows_joined
from autopar.ops.symmetric_products import SYMMETRIC

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
ALL_GATHER = _c10d.all_gather_into_tensor.default
ALL_REDUCE = _c10d.all_reduce.default
ALL_REDUCE_IN_PLACE = _c10d.all_reduce_.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
WAIT = _c10d.wait_tensor.default
REDUCTIONS = frozenset({ALL_REDUCE, ALL_REDUCE_IN_PLACE, REDUCE_SCATTER})
CHUNK_OF = "chunk_of"
"""Key in the meta of a start that moves one of several chunks: the name of the start that moved all of them."""
HOP = "hop"
"""Key in the meta of a start that passes a block on around a ring. What stands between two of them differs from rank to
rank: of a causal ring the first computes one block and the last one all."""

_LIGHT = frozenset(
    {
        padded,
        piece,
        pieces_first,
        pieces_joined,
        region,
        trimmed,
        packed,
        packed_rows,
        rows_part,
        rows_joined,
        torch.ops.autopar.pack.default,
        torch.ops.autopar.unpack.default,
        operator.getitem,
        _aten.contiguous.default,
        _aten.reshape.default,
        _aten.view.default,
        _aten.permute.default,
        _aten.split_with_sizes.default,
        _aten.resolve_conj.default,
        _aten.view_as_real.default,
        _aten.view_as_complex.default,
        _aten._to_copy.default,
        COPY_FROM_HOST,
        WAIT_COPY,
    }
)
"""Calls that lay data out, cast it, or bring it from the host."""
_ADD_TO_TOTAL = _aten.add_.Tensor


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a collective."""
    return _starts(node.target)


@cache
def _starts(target: object) -> bool:
    return getattr(target, "namespace", None) == "_c10d_functional" and target is not WAIT


def _passes_on(target: object) -> bool:
    """Whether a call only passes on what collectives bring."""
    return target is WAIT or target is _ADD_TO_TOTAL or target in _LIGHT


def group_of(node: fx.Node) -> str | None:
    """The group whose ranks a node meets, in a collective or in a product with one; None for any other node."""
    if node.op != "call_function" or not (is_start(node) or node.target in SYMMETRIC):
        return None
    last = node.args[-1]
    return last if isinstance(last, str) else None


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits for the collective that `start` starts."""
    return [user for user in start.users if user.target is WAIT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """All collectives of one graph. starts: in the order of the given nodes.

    late: waits, and light nodes behind them. waits_into: the waits on the light way into a start; makers: what computes
    on that way. level: how many collectives stand one behind the other on it. returned: starts whose results are
    returned, with nothing but light nodes and further collectives behind them.
    """

    starts: tuple[fx.Node, ...]
    late: frozenset[fx.Node]
    waits_into: dict[fx.Node, tuple[fx.Node, ...]]
    makers: dict[fx.Node, tuple[fx.Node, ...]]
    level: dict[fx.Node, int]
    returned: frozenset[fx.Node]

    def is_early_gather(self, start: fx.Node) -> bool:
        """Whether a start gathers what is there from the beginning: a parameter, or what forward saved."""
        return start.target is ALL_GATHER and not self.waits_into[start] and not self.makers[start]

    def is_last_reduction(self, start: fx.Node) -> bool:
        """Whether a start reduces what is then returned: a gradient."""
        return start.target in REDUCTIONS and start in self.returned


def describe(nodes: Sequence[fx.Node]) -> Collectives:
    """Read the collectives of a graph's nodes, which may be in any order."""
    starts = [node for node in nodes if is_start(node)]
    starting = set(starts)
    passing = starting.union(node for node in nodes if _passes_on(node.target))
    operands_first = list(_sorted(nodes, passing))
    late: set[fx.Node] = set()
    level: dict[fx.Node, int] = {}
    for node in operands_first:
        operands, waits = node.all_input_nodes, node.target is WAIT
        level[node] = max((level.get(operand, 0) for operand in operands), default=0) + waits
        if waits or (node not in starting and not late.isdisjoint(operands)):
            late.add(node)
    ways = {start: list(_way_into(start)) for start in starts}
    return Collectives(
        starts=tuple(starts),
        late=frozenset(late),
        waits_into={start: tuple(node for node in way if node.target is WAIT) for start, way in ways.items()},
        makers={start: tuple(node for node in way if node.target is not WAIT) for start, way in ways.items()},
        level={start: level[start] for start in starts},
        returned=_only_returned(operands_first, late | starting) & starting,
    )


def _sorted(nodes: Sequence[fx.Node], among: set[fx.Node]) -> Iterator[fx.Node]:
    """Those among the nodes, with operands among them first, else in their order."""
    done: set[fx.Node] = set()
    for node in nodes:
        stack = [node] if node in among and node not in done else []
        while stack:
            current = stack[-1]
            missing = [operand for operand in current.all_input_nodes if operand in among and operand not in done]
            stack.extend(reversed(missing))
            if not missing and stack.pop() not in done:
                done.add(current)
                yield current


def _way_into(start: fx.Node) -> Iterator[fx.Node]:
    """The waits and the computing nodes from which a start takes its operand, by way of light nodes."""
    seen: set[fx.Node] = set()
    stack = list(start.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        if node.target in _LIGHT:
            stack.extend(node.all_input_nodes)
        else:
            yield node


def _only_returned(operands_first: Sequence[fx.Node], passing: set[fx.Node]) -> frozenset[fx.Node]:
    """Of the nodes that pass values on, starts and late ones, those that nothing but the output reads, by way of others
    of them."""
    found: set[fx.Node] = set()
    for node in reversed(operands_first):
        if node in passing and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return frozenset(found)

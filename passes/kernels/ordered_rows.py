"""Ordered rows: which operators around products that want rows in another order run in that order as well.

    g = product(x);  h = mul(silu(g), u);  y = product(h);  z = mul(y, r)        r (T, 1), every other one (T, N)

    silu, mul       they read ordered rows only, and are read so        in order
    z               r must be ordered, but y need not be put back       in order: r has fewer bytes than y
    add(z, x0)      x0 has as many bytes as z                           not in order: z is put back in front of it

An operator joins if it treats every row alike (`row_wise.py`) and that moves fewer bytes than putting rows back, or, in
front of products only, no more than ordering its own result. Where it makes rows wider that nothing in order reads (y
in bf16, r in fp32), it leaves again: y is put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from torch import fx

from autopar.passes.kernels.graph_patterns import dtype_of, shape_of
from autopar.passes.kernels.row_wise import RowWise, row_wise
from autopar.rules.engine import RESHAPES


class OrderedRows:
    """products: those that want ordered rows, with what they read and return; start: the order is known behind it;
    others: products that want another order, which never join; may: asked of whatever treats rows alike, before
    it joins.

    inside: products, and all that joins them.
    """

    def __init__(
        self,
        products: Mapping[fx.Node, RowWise],
        start: fx.Node,
        others: Collection[fx.Node] = (),
        may: Callable[[fx.Node, RowWise], bool] = lambda node, how: True,
    ) -> None:
        self._start, self._may, self._products = start, may, frozenset(products)
        self._count = shape_of(start)[0]
        self._known: dict[fx.Node, RowWise | None] = {**dict.fromkeys(others), **products}
        self.inside = set(products)
        self._gathered = {_key(operand) for product in products.values() for operand in product.operands}
        self._grow()
        for node in sorted(self.inside, reverse=True):
            self._leave_wider(node)

    @classmethod
    def given(cls, inside: Mapping[fx.Node, RowWise]) -> OrderedRows:
        """What is said to run in order, as it treats rows."""
        found = cls.__new__(cls)
        found._known = dict(inside)
        found.inside = set(inside)
        return found

    def operands(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Operands of a node whose rows are ordered where it runs in order."""
        how = self._row_wise(node)
        return () if how is None else how.operands

    def reads(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether a node reads ordered rows of a value."""
        return node in self.inside and value in self.operands(node)

    def is_ordered(self, value: fx.Node) -> bool:
        """Whether a value has ordered rows, since its operator runs in order and returns them."""
        how = self._row_wise(value) if value in self.inside else None
        return how is not None and how.returns_rows

    def _grow(self) -> None:
        """Until nobody joins: whoever does makes others cheaper, also those that read a view of the same value."""
        size = 0
        while len(self.inside) > size:
            size = len(self.inside)
            candidates = [near for node in sorted(self.inside) for near in self._near(node)]
            while candidates:
                node = candidates.pop()
                if node not in self.inside and self._joins(node):
                    self.inside.add(node)
                    self._gathered |= {_key(operand) for operand in self.operands(node)}
                    candidates += self._near(node)

    def _leave_wider(self, last: fx.Node) -> None:
        """Take out what ends in a value that has more bytes than one on the way to it, which is put back instead."""
        way, node = list[fx.Node](), last
        if not self.is_ordered(last) or any(self.reads(user, last) for user in last.users):
            return
        while True:
            ordered = {operand for operand in self.operands(node) if self.is_ordered(operand)}
            if len(ordered) != 1 or node in self._products or has_several(node):
                return
            way.append(node)
            (node,) = ordered
            if has_several(node) or any(user not in way and self.reads(user, node) for user in node.users):
                return
            if bytes_of_rows(node) < bytes_of_rows(last):
                self.inside.difference_update(way)
                return

    def _near(self, node: fx.Node) -> list[fx.Node]:
        """Readers of a node, and what it reads."""
        return [*node.users, *self.operands(node)]

    def _joins(self, node: fx.Node) -> bool:
        how = self._row_wise(node)
        if how is None or not how.operands or node < self._start:
            return False
        gathered = sum(self._cost(operand, node) for operand in set(how.operands) if not self.is_ordered(operand))
        kept = sum(bytes_of_rows(operand) for operand in set(how.operands) if self.is_ordered(operand))
        if kept:
            return gathered < kept
        is_wanted = _key(node) in self._gathered and all(self.reads(user, node) for user in node.users)
        return is_wanted and how.returns_rows and gathered <= bytes_of_rows(node)

    def _cost(self, value: fx.Node, reader: fx.Node) -> int:
        """Bytes to gather so that a value is ordered: its own, or of what it is made of, if its operator joins too."""
        if _key(value) in self._gathered:
            return 0
        own, how = bytes_of_rows(value), self._row_wise(value)
        if how is None or not how.returns_rows or not how.operands or value < self._start:
            return own
        if any(user is not reader and not self.reads(user, value) for user in value.users):
            return own
        parts = (part for part in set(how.operands) if not self.is_ordered(part) and _key(part) not in self._gathered)
        return min(own, sum(map(bytes_of_rows, parts)))

    def _row_wise(self, node: fx.Node) -> RowWise | None:
        if node not in self._known:
            how = row_wise(node, self._count)
            self._known[node] = how if how is not None and self._may(node, how) else None
        return self._known[node]


def viewed(node: fx.Node) -> fx.Node:
    """What a chain of reshapes looks at: backward writes those of forward once more."""
    while node.op == "call_function" and node.target in RESHAPES:
        (node,) = node.all_input_nodes
    return node


def has_several(node: fx.Node) -> bool:
    """Whether a call returns several values."""
    return isinstance(node.meta.get("val"), tuple | list)


def bytes_of_rows(node: fx.Node) -> int:
    """Bytes of the local value of a node, of all values of one that has several."""
    if has_several(node):
        return sum(one.numel() * one.element_size() for one in node.meta["val"])
    return math.prod(shape_of(node)) * dtype_of(node).itemsize


def _key(node: fx.Node) -> object:
    return node if has_several(node) else (viewed(node), shape_of(node))

"""Zero rows: what runs beside products of experts where rows that nobody has were added, and others were dropped.

    g = product(x);  h = silu(g + b[ids]);  y = product(h);  z = y + c[ids];  s = sum(h)

    g + b[ids], silu    added rows are not zero, but finite, and only a product reads them       with the products
    y + c[ids]          of a dropped row it is c[ids], which no row that travelled can say       where rows are whole
    sum(h)              it would count added rows, and miss dropped ones                         where rows are whole

An added row is zero where it leaves its rank; a dropped one is zero in what products return. An operator runs with the
products if its result is finite where its operands are: so no added row makes a gradient NaN, since one of the two
operands that a product sums over is zero there. What others read must be zero in dropped rows, and what is summed over
rows in both. All else runs where the model's rows are, as if the dropped were rows of no expert: the result does not
depend on who runs where.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.graphs.node_values import VIEWS
from autopar.passes.kernels.ordered_rows import OrderedRows
from autopar.passes.kernels.row_wise import RowWise
from autopar.rules.engine import RESHAPES, tensor_operands

_POWER, _ITEM = "aten.pow.Tensor_Scalar", str(operator.getitem)
_ANY = frozenset({"aten.mul.Tensor", "autopar.gated.default"})
"""Zero where one of the operands is."""
_FIRST = frozenset(
    {
        *map(str, VIEWS | RESHAPES), "aten.clone.default", "aten._to_copy.default", "aten.contiguous.default",
        "aten.select.int", "aten.slice.Tensor", "aten.mul.Scalar", "aten.div.Scalar", "aten.neg.default", _POWER,
        "aten.silu.default", "aten.gelu.default", "aten.relu.default", "aten.tanh.default",
        "aten.silu_backward.default", "aten.gelu_backward.default", "aten.threshold_backward.default",
        "aten.tanh_backward.default", "aten.sigmoid_backward.default", "aten.sum.dim_IntList", "aten.mean.dim",
        "aten.embedding_dense_backward.default", "autopar.gated_backward.default", _ITEM,
    }
)  # fmt: skip
"""Zero where the first operand is."""
_SUMS = frozenset({"aten.add.Tensor", "aten.sub.Tensor"})
"""Zero where both operands are, neither a number."""
_ALL = frozenset({"aten.cat.default", "aten.slice_scatter.default"})
"""Zero where all operands are."""
_CHOICES = frozenset({"aten.where.self"})
"""Zero where all operands behind the first are."""
_FINITE = frozenset(
    {
        "aten.sigmoid.default", "aten.embedding.default", "aten.clamp.default", "aten.add.Scalar", "aten.sub.Scalar",
        "aten.ge.Scalar", "aten.gt.Scalar", "aten.le.Scalar", "aten.lt.Scalar", "aten.logical_and.default",
        "aten.bitwise_and.Tensor", "aten.bitwise_not.default", "aten.logical_not.default",
    }
)  # fmt: skip
"""Never known to be zero, but finite where the operands are."""
_KNOWN = _ANY | _FIRST | _SUMS | _ALL | _CHOICES | _FINITE
_CONSTANTS = frozenset({"aten.full.default", "aten.scalar_tensor.default"})


def rows_with_zeros(
    products: Mapping[fx.Node, RowWise],
    start: fx.Node,
    others: Collection[fx.Node] = (),
    may: Callable[[fx.Node, RowWise], bool] = lambda node, how: True,
    apart: frozenset[fx.Node] = frozenset(),
) -> OrderedRows:
    """As `OrderedRows`, of products some of whose rows are zeros that were added in place of others. apart: operators
    that do not join."""

    def joins(node: fx.Node, how: RowWise) -> bool:
        return node not in apart and _is_finite(node) and may(node, how)

    rows = OrderedRows(products, start, others, joins)
    spoiled = frozenset(_Zeros(rows, products).spoiled())
    return rows_with_zeros(products, start, others, may, apart | spoiled) if spoiled else rows


def _is_finite(node: fx.Node) -> bool:
    """Whether an operator makes no NaN and no infinity of rows of zeros."""
    if str(node.target) == _POWER:
        exponent = node.args[1]
        return isinstance(exponent, int | float) and exponent >= 1
    return str(node.target) in _KNOWN


@dataclass(frozen=True, slots=True)
class _Zeros:
    """added, dropped: values that are zero in the rows that were added, and in those that were dropped."""

    rows: OrderedRows
    products: Mapping[fx.Node, RowWise]
    added: set[fx.Node] = field(default_factory=set)
    dropped: set[fx.Node] = field(default_factory=set)

    def spoiled(self) -> Iterator[fx.Node]:
        """Operators among the products that must not run there."""
        for node in sorted(self.rows.inside):
            if node in self.products:
                yield from self._of_product(node)
                continue
            for zero in (self.added, self.dropped):
                if self._is_kept(node, zero):
                    zero.add(node)
            leaves = any(not self.rows.reads(user, node) for user in node.users)
            returns = self.rows.is_ordered(node)
            if (node not in self.dropped and (leaves or not returns)) or not (node in self.added or returns):
                yield node

    def _of_product(self, node: fx.Node) -> Iterator[fx.Node]:
        """A product returns zero in dropped rows. Where it sums over rows, one operand must be zero in added ones."""
        operands = self.rows.operands(node)
        added = [operand for operand in operands if self._is_zero(operand, node, self.added)]
        if self.products[node].returns_rows:
            self.dropped.add(node)
            self.added.update([node] if added else [])
        elif not added:
            yield self._maker(operands[-1])

    def _maker(self, value: fx.Node) -> fx.Node:
        """The operator, no product, that made the added rows of a value what they are."""
        while value in self.products:
            (value,) = self.rows.operands(value)
        return value

    def _is_kept(self, node: fx.Node, zero: set[fx.Node]) -> bool:
        """Whether the rows of `zero` are zero in the result, too."""
        name = str(node.target)
        operands = node.all_input_nodes if name == _ITEM else tensor_operands(node)
        zeros = [self._is_zero(operand, node, zero) for operand in operands]
        if name in _ANY:
            return any(zeros)
        if name in _FIRST:
            return zeros[0]
        if name in _SUMS:
            return len(zeros) == 2 and all(zeros)
        return all(zeros[1:] if name in _CHOICES else zeros) and name in _CHOICES | _ALL

    def _is_zero(self, operand: fx.Node, reader: fx.Node, zero: set[fx.Node]) -> bool:
        if str(operand.target) in _CONSTANTS:
            return bool(operand.args[-1] == 0)
        arrives = operand in self.rows.operands(reader) and not self.rows.is_ordered(operand)
        return operand in zero or (arrives and zero is self.added)

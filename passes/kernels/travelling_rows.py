"""Rows that travel: what runs beside products of experts on other ranks, where each exchange has a latency.

    y = product(h);  z = mul(y, r)        r (T, 1): y comes back instead of z, and r stays: one exchange less
    h = product(x) + b[ids]               ids (T,) travel, as h would twice else

An operator stays at home if it needs little ones of their own and nothing that products read comes of it, or wide ones
from home, too. Where tokens travel once (`token_copies.py`), rows are added up there, and weights of routing
with them: `OrderedRows` as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from autopar.passes.kernels.ordered_rows import OrderedRows, bytes_of_rows
from autopar.passes.kernels.token_copies import copied_tokens

LITTLE = 8
"""So many times smaller than what is made of them are rows whose exchange is nothing but a latency."""


class TravellingRows(OrderedRows):
    """`OrderedRows` without what brings little rows for nothing that products read."""

    def _joins(self, node: fx.Node) -> bool:
        return super()._joins(node) and not self._brings_little(node)

    def _brings_little(self, node: fx.Node) -> bool:
        how, operands = self._row_wise(node), self.operands(node)
        if how is None or not how.returns_rows:  # a sum over rows spares the way back of wide ones
            return False
        away = [operand for operand in operands if not self.is_ordered(operand)]
        little = [operand for operand in away if 0 < LITTLE * self._cost(operand, node) <= bytes_of_rows(node)]
        from_wide = len(little) < len(away) == len(operands)
        return bool(little) and (from_wide or not self._leads_to_products(node))

    def _leads_to_products(self, node: fx.Node) -> bool:
        """Whether products read what rows of a node become, each for itself."""
        waiting, seen = [node], {node}
        while waiting:
            for user in waiting.pop().users:
                if user in self._products:
                    return True
                how = self._row_wise(user)
                if user not in seen and how is not None and how.returns_rows:
                    seen.add(user)
                    waiting.append(user)
        return False


def rows_of_a_token(operands: Iterable[fx.Node]) -> int:
    """Of how many rows each token is copied into, by what products read."""
    return next((found[1] for found in map(copied_tokens, operands) if found is not None), 1)

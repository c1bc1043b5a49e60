"""Ordered shards: dims that lie in an order of their own, as DTensor keeps them.

    S(0, order=0-3-1-2) over two ranks     rank 0 has rows 0 and 3, rank 1 rows 1 and 2

To DTensor that is a strided shard whose split factor no plan has. All that works element by element (optimizers, casts,
copies, zeros alike) hands the factor on, and wherever torch cuts such a dim, or puts it together, its rows are put in
the order first, or back (`full_tensor`, `redistribute`): so a DTensor is what the model's parameter is. Where several
axes split the dim, `full_tensor` alone does so, and all else is an error of torch.

Factors number the orders of a process as it meets them, which all ranks do alike. Of blocks that another process wrote
as they lie (`torch.save`) none knows the order, and nobody takes them for the whole: that is an error.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar._compat import StridedShard, order_strided_shards

FIRST = 1 << 24
"""The split factor of the first order; a dim of so many pieces has no order."""
_orders: list[tuple[int, ...]] = []


def factor_of(order: tuple[int, ...]) -> int:
    """The split factor that stands for an order."""
    _follow_orders()
    if order not in _orders:
        _orders.append(order)
    return FIRST + _orders.index(order)


def order_behind(placement: Placement) -> tuple[int, ...] | None:
    """The order for which a placement stands; None for one of any other kind."""
    return _order_of(int(placement.split_factor)) if isinstance(placement, StridedShard) else None


def _order_of(factor: int) -> tuple[int, ...] | None:
    if factor < FIRST:
        return None
    if factor - FIRST >= len(_orders):
        raise RuntimeError(
            "a DTensor has its experts in an order that this process does not know: torch.save wrote blocks of a plan "
            "that places experts; write whole tensors (module.full_state_dict()) or a checkpoint (autopar.save)"
        )
    return _orders[factor - FIRST]


@functools.cache
def _follow_orders() -> None:
    """Once per process."""
    order_strided_shards(_order_of)
    as_it_lies = DTensor.full_tensor

    def full_tensor(self: DTensor, **options: Any) -> torch.Tensor:
        orders = {p.dim: order for p in self.placements if isinstance(p, StridedShard) and (order := order_behind(p))}
        whole = as_it_lies(_plain(self) if orders else self, **options)
        for dim, order in orders.items():
            whole = whole.index_select(dim, torch.tensor(order, device=whole.device).argsort())
        return whole

    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]


def _plain(tensor: DTensor) -> DTensor:
    """The same blocks, taken for those of a whole that lies in the order. Differentiable."""
    placements = [Shard(p.dim) if order_behind(p) and isinstance(p, StridedShard) else p for p in tensor.placements]
    return DTensor.from_local(
        tensor.to_local(), tensor.device_mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )

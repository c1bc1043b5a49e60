"""Collectives of graphs that run on CPUs: those of `host_collectives.py` in place of torch's, with the operator's name.

    y = reduce_scatter_tensor(x, "sum", 4, "7")     -->     y = reduce_scatter(x, "sum", 4, "7", "head/linear#0/bwd")
    z = wait_tensor(y)                              -->     z = wait(y)

What they do not do is left to torch: tensors on other devices, other backends than gloo, sums of bools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import fx

from autopar._compat import resolve_group
from autopar.ops.symmetric_products import gathered_products, product_scattered
from autopar.runtime.collectives.communicator import communicator_of
from autopar.runtime.collectives.flight_record import RECORD
from autopar.runtime.collectives.host_collectives import (
    FOLDED,
    REDUCTIONS,
    Started,
    start_all_gather,
    start_all_reduce,
    start_all_reduce_in_place,
    start_all_to_all,
    start_reduce_scatter,
)
from autopar.runtime.collectives.progress import HERE

_c10d = torch.ops._c10d_functional
MaybeStarted: TypeAlias = Started | torch.Tensor
"""A tensor is one that torch's own collective writes."""
_NOT_REDUCED = frozenset({torch.bool, torch.float8_e4m3fn, torch.float8_e5m2})


def all_reduce(x: torch.Tensor, reduction: str, group: str, operator: str) -> MaybeStarted:
    """As torch's functional all_reduce."""
    if _is_ours(x, group, reduction):
        return start_all_reduce(x, reduction, group, operator)
    _record("all_reduce", x, group, operator)
    return _c10d.all_reduce(x, reduction, group)  # type: ignore[no-any-return]


def all_reduce_(x: torch.Tensor, reduction: str, group: str, operator: str) -> MaybeStarted:
    """As torch's functional all_reduce_: the result is written to `x`."""
    if _is_ours(x, group, reduction) and x.is_contiguous():
        return start_all_reduce_in_place(x, reduction, group, operator)
    _record("all_reduce", x, group, operator)
    return _c10d.all_reduce_(x, reduction, group)  # type: ignore[no-any-return]


def reduce_scatter(x: torch.Tensor, reduction: str, ranks: int, group: str, operator: str) -> MaybeStarted:
    """As torch's functional reduce_scatter_tensor."""
    if _is_ours(x, group, reduction):
        return start_reduce_scatter(x, reduction, ranks, group, operator)
    _record("reduce_scatter", x, group, operator)
    return _c10d.reduce_scatter_tensor(x, reduction, ranks, group)  # type: ignore[no-any-return]


def all_gather(x: torch.Tensor, ranks: int, group: str, operator: str) -> MaybeStarted:
    """As torch's functional all_gather_into_tensor."""
    if _is_ours(x, group):
        return start_all_gather(x, ranks, group, operator)
    _record("all_gather", x, group, operator)
    return _c10d.all_gather_into_tensor(x, ranks, group)  # type: ignore[no-any-return]


def all_to_all(
    x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: str, operator: str
) -> MaybeStarted:
    """As torch's functional all_to_all_single."""
    if _is_ours(x, group):
        return start_all_to_all(x, received, sent, group, operator)
    _record("all_to_all", x, group, operator)
    return _c10d.all_to_all_single(x, received, sent, group)  # type: ignore[no-any-return]


def gathered(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """As `gathered_products`; the last argument is the operator."""
    _record("gathered_products", x, arguments[-2], arguments[-1])
    return gathered_products(x, *arguments[:-1])


def scattered(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """As `product_scattered`; the last argument is the operator."""
    _record("product_scattered", x, arguments[-2], arguments[-1])
    return product_scattered(x, *arguments[:-1])


def wait(started: MaybeStarted) -> torch.Tensor:
    """As torch's wait_tensor. Raises RankLostError where a rank of the group has ended or is late."""
    if isinstance(started, Started):
        return started.wait()
    return _c10d.wait_tensor(started)  # type: ignore[no-any-return]


def _record(kind: str, x: torch.Tensor, group: str, operator: str) -> None:
    """Note a collective that torch runs: on a GPU the host does not see its end."""
    ranks = tuple(dist.get_process_group_ranks(resolve_group(group)))
    HERE.collective = RECORD.begin(kind, operator, ranks, x.nbytes, by_torch=True)


def _is_ours(x: torch.Tensor, group: str, reduction: str = "") -> bool:
    if x.device.type != "cpu" or (reduction and (reduction not in REDUCTIONS or x.dtype in _NOT_REDUCED)):
        return False
    return communicator_of(group).speaks_gloo


COLLECTIVES: Mapping[Any, Callable[..., MaybeStarted]] = {
    _c10d.all_reduce.default: all_reduce,
    _c10d.all_reduce_.default: all_reduce_,
    _c10d.reduce_scatter_tensor.default: reduce_scatter,
    _c10d.all_gather_into_tensor.default: all_gather,
    _c10d.all_to_all_single.default: all_to_all,
}


_IN_SYMMETRIC_MEMORY: Mapping[Any, Callable[..., Any]] = {gathered_products: gathered, product_scattered: scattered}
"""They are the same, and noted."""


def use_host_collectives(graph: fx.Graph, folds: bool = False) -> None:
    """Let the collectives of a graph bound to process groups be those of the module docstring, in place. folds: sums
    are folded ones. One graph may start what another one waits for (`passes/overlap/left_open.py`)."""
    for node in graph.nodes:
        if node.target in _IN_SYMMETRIC_MEMORY:
            node.args = (*node.args, operator_text(node))
            node.target = _IN_SYMMETRIC_MEMORY[node.target]
        elif node.target in COLLECTIVES:
            assert not node.kwargs, f"{node} takes arguments by name"
            waits = [user for user in node.users if user.target is _c10d.wait_tensor.default]
            handed_on = sum(user.op == "output" for user in node.users)
            assert len(waits) + handed_on == len(node.users), f"{node} is read before it is waited for"
            given = [FOLDED if folds and argument == "sum" else argument for argument in node.args]
            node.args = (*given, operator_text(node))
            node.target = COLLECTIVES[node.target]
            for waiting in waits:
                waiting.target = wait
        elif node.target is _c10d.wait_tensor.default and node.all_input_nodes[0].op == "placeholder":
            node.target = wait


def operator_text(node: fx.Node) -> str:
    """The operator or parameter that a collective serves, as errors name it."""
    text, phase = str(node.meta.get("operator", node.name)), str(node.meta.get("phase", ""))
    return f"{text} ({phase})" if phase else text

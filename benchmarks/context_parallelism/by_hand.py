"""What one writes without a planner: ring attention and Ulysses with torch.distributed, blocks of a sequence in order.

    ring       isend and irecv of keys and values to the next rank beside the block that is at hand; a block of later
               keys is passed on only; sums of gradients follow the keys                    (arXiv 2310.01889)
    ulysses    all_to_all_single of queries, keys, values and the result; fewer key heads than ranks are repeated
                                                                                            (arXiv 2309.14509)

Everything else is the plain model on a rank's tokens under DistributedDataParallel, which sums gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.context_parallelism.model import Mix, causal, split_by_sequence
from benchmarks.plan_quality.baselines import Baseline
from benchmarks.plan_quality.baselines.trained import Trained, sgd, trained
from benchmarks.plan_quality.settings import Inputs

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ring(torch.autograd.Function):
    """Blocks of keys and values go around; every rank attends to those that are not later than its own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        block = torch.stack([key, value])
        out, sums = torch.zeros_like(query), query.new_full(query.shape[:-1], -math.inf)
        for step in range(ranks):
            wait = _pass_on(block, group) if step + 1 < ranks else None
            if step <= rank:
                part = _forward(query, *_repeated(block, query), is_causal=step == 0)
                out, sums = part if step == 0 else _joined(out, sums, *part)
            if wait is not None:
                block = wait()
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        group, grad = ctx.group, grad.contiguous()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        block = torch.stack([key, value])
        of_query, home = torch.zeros_like(query), None
        for step in range(ranks):
            wait = _pass_on(block, group) if step + 1 < ranks else None
            found = torch.zeros_like(block)
            if step <= rank:
                part, *of_keys = _backward(
                    grad, query, *_repeated(block, query), out, sums, dropout_p=0.0, is_causal=step == 0
                )
                of_query += part
                found += torch.stack([x.view(*block.shape[1:3], -1, *x.shape[-2:]).sum(2) for x in of_keys])
            if home is not None:
                found += home()
            home = _pass_on(found, group)
            if wait is not None:
                block = wait()
        assert home is not None
        of_key, of_value = home()
        return of_query, of_key, of_value, None


def _pass_on(block: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start the way of a block to the next rank; what is returned waits for that of the one before."""
    rank, ranks, arrived = dist.get_rank(group), dist.get_world_size(group), torch.empty_like(block)
    to, of = ((rank + 1) % ranks, (rank - 1) % ranks)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, block, dist.get_global_rank(group, to), group),
            dist.P2POp(dist.irecv, arrived, dist.get_global_rank(group, of), group),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return arrived

    return wait


def _repeated(block: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, one head per head of the queries."""
    key, value = block.repeat_interleave(query.shape[1] // block.shape[2], 2)
    return key, value


def _joined(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(sums, part_sums)
    weights = ((each - both).exp().unsqueeze(-1) for each in (sums, part_sums))
    return next(weights) * out + next(weights) * part, both


class Exchange(torch.autograd.Function):
    """(B, heads, S / ranks, D) -> (B, heads / ranks, S, D), or back; backward is the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> Tensor:
        ctx.group, ctx.cut, ctx.joined = group, cut, joined
        return _exchanged(x, group, cut, joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grad, ctx.group, ctx.joined, ctx.cut), None, None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> Tensor:
    """Cut along one dim, a part to every rank, joined along the other."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), cut))
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return torch.cat(tuple(arrived), joined)


def ring(group: dist.ProcessGroup) -> Mix:
    """Attention of a rank's rows by a ring."""

    def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result: Tensor = Ring.apply(query, key, value, group)  # type: ignore[no-untyped-call]
        return result

    return mix


def ulysses(group: dist.ProcessGroup) -> Mix:
    """Attention of some heads over all rows."""

    def exchanged(x: Tensor, cut: int, joined: int) -> Tensor:
        result: Tensor = Exchange.apply(x, group, cut, joined)  # type: ignore[no-untyped-call]
        return result

    def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        copies = max(1, dist.get_world_size(group) // key.shape[1])
        own = (query, *(x.repeat_interleave(copies, 1) for x in (key, value)))
        mixed = causal(*(exchanged(x, 1, 2) for x in own))
        return exchanged(mixed, 2, 1)

    return mix


def _split(way: Callable[[dist.ProcessGroup], Mix], model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    group = dist.new_group(list(range(ranks)))
    rank, length = dist.get_rank(), inputs["x"].shape[1] // ranks
    split_by_sequence(model, way(group), rank * length)
    module = DistributedDataParallel(model)
    own = {name: value.narrow(1, rank * length, length).contiguous() for name, value in inputs.items()}
    return trained(module, own, sgd(module.parameters()))


def _ring(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    return _split(ring, model, inputs, ranks)


def _ulysses(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    return _split(ulysses, model, inputs, ranks)


BY_HAND: Mapping[str, Baseline] = {
    "ring by hand": Baseline(plan="isend and irecv of keys and values, DDP", build=_ring),
    "ulysses by hand": Baseline(plan="all_to_all_single of heads, DDP", build=_ulysses),
}

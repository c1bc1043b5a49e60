"""What one writes without a planner: expert parallelism as torchtitan has it, with torch.distributed alone.

    sizes      all_to_all_single of how many rows every expert gets from whom
    rows       all_to_all_single with split sizes, rows sorted by expert; gradients go the other way
    products   a rank's own experts, one after the other
    back       the same exchange the other way; sums are made where the tokens are

Everything else is the plain model on a rank's part of the batch under DistributedDataParallel. Experts are no part of
it: the gradient of a rank's own is the sum over all ranks already, of losses that are means of a part each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.expert_parallelism.model import Combine, Experts, GatedExperts, expert_layers
from benchmarks.plan_quality.baselines import BASELINES, Baseline
from benchmarks.plan_quality.baselines.trained import Trained, my_part, sgd, trained
from benchmarks.plan_quality.settings import Inputs


class Exchange(torch.autograd.Function):
    """Rows (sum of sent, D) -> (sum of received, D); sent, received: rows to and from every rank."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


def dispatched(own: GatedExperts, group: dist.ProcessGroup) -> Combine:
    """A mixture of which this rank holds `own` experts, as many as every other rank, in the order of ranks."""
    ranks, held = dist.get_world_size(group), len(own.gate)

    def combine(layer: Experts, rows: Tensor, weights: Tensor, picked: Tensor) -> Tensor:
        ids = picked.flatten()
        order = ids.argsort(stable=True)
        token = order.div(picked.shape[1], rounding_mode="floor")
        counts = torch.bincount(ids, minlength=ranks * held)
        table = torch.empty_like(counts)
        dist.all_to_all_single(table, counts, group=group)
        sent, received = (each.view(ranks, -1).sum(1).tolist() for each in (counts, table))
        arrived = exchanged(rows[token], sent, received)
        by_expert = torch.arange(held).repeat(ranks).repeat_interleave(table).argsort(stable=True)
        parts = torch.split(arrived[by_expert], table.view(ranks, -1).sum(0).tolist())
        found = torch.cat([own(part, number) for number, part in enumerate(parts)])
        back = exchanged(torch.empty_like(found).index_copy(0, by_expert, found), received, sent)
        return torch.zeros_like(rows).index_add(0, token, back * weights.flatten()[order, None])

    def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        result: Tensor = Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
        return result

    return combine


class ExpertParallel(nn.Module):
    """A model whose mixtures dispatch: all but experts is replicated, of experts a rank has its block. forward: of the
    rank's part of the batch, to its mean loss. All ranks make it alike, of a model that has no experts from then on.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.own = nn.ModuleList()
        for layer in expert_layers(model):
            own = layer.experts
            for name, matrices in own.named_parameters():
                setattr(own, name, nn.Parameter(matrices.detach().chunk(ranks)[rank].clone()))
            self.own.append(own)
            del layer.experts
            layer.combine = dispatched(own, group)
        average_gradients(self.own, ranks)
        self.rest = DistributedDataParallel(model)

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.rest(**inputs)
        return loss


def average_gradients(experts: nn.Module, ranks: int) -> None:
    """What has been added up over the ranks becomes a mean, as DDP makes it of the rest."""
    for parameter in experts.parameters():
        parameter.register_hook(lambda grad: grad / ranks)  # type: ignore[no-untyped-call]


def _dispatch(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    module = ExpertParallel(model, dist.new_group(list(range(ranks))))
    return trained(module, my_part(inputs), sgd(module.parameters()))


BY_HAND: Mapping[str, Baseline] = {
    "dispatch by hand": Baseline(plan="all_to_all_single of rows, DDP of all but experts", build=_dispatch),
    "replicated by hand": Baseline(plan="DDP", build=BASELINES["ddp"].build),
}

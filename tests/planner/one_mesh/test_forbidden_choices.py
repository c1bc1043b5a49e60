"""Heads that do not divide: the plan splits something else, or the error names operator, dims, sizes and ways out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

SPREAD = {"no_replicated_compute": True}


class Attention(nn.Module):
    """Five heads. forward(x (B, T, 5 * d), or (T, B, 5 * d)) -> scalar; q, k and v by one product or by three."""

    def __init__(self, head: int, fused: bool, batch_dim: int = 0) -> None:
        super().__init__()
        self.head, self.batch_dim, width = head, batch_dim, 5 * head
        self.fused = nn.Linear(width, 3 * width) if fused else None
        self.alone = nn.ModuleList([] if fused else [nn.Linear(width, width) for _ in range(3)])
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part(x) for part in self.alone] if self.fused is None else self.fused(x).chunk(3, -1)
        q, k, v = (part.transpose(0, self.batch_dim).unflatten(-1, (5, self.head)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).transpose(0, self.batch_dim).flatten(2)).pow(2).mean()


def plan(head: int, fused: bool, length: int, tp: int, batch_dim: int = 0) -> autopar.Plan:
    x = torch.zeros(7, length, 5 * head).transpose(0, batch_dim)
    asked = {"dims": {"tp": tp}, "constraints": SPREAD, "batch_dims": {"args.0": batch_dim}}
    return autopar.plan(Attention(head, fused, batch_dim), x, cluster=f"{tp} cpu", mode="fast", **asked)


def test_an_error_names_operators_dims_sizes_and_ways_out() -> None:
    words = (
        r"on the mesh tp=2: nothing connects .*attention.* \(7, 5, 15, 7\) .*no split of h over tp=2: 5 does not divide"
        r".*Ways out: .*dims: tp=.*5.*leave out no_replicated_compute"
    )
    with pytest.raises(autopar.InfeasibleError, match=words):
        plan(7, fused=True, length=15, tp=2, batch_dim=1)


def test_a_way_out_is_one() -> None:
    found = plan(7, fused=True, length=15, tp=5, batch_dim=1)
    assert not any("heads" in note for note in found.notes), found.notes


@pytest.mark.parametrize(("fused", "length"), [(True, 15), (True, 16), (False, 16)])
def test_heads_that_do_not_divide_leave_the_sequence_to_split(fused: bool, length: int) -> None:
    notes = [note for note in plan(8, fused, length, tp=2).notes if "heads" in note]
    assert notes == ["5 attention heads do not divide by tp=2: attention splits the query sequence over it instead"]

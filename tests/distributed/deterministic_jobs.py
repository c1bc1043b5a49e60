"""Jobs of the workers: weights behind a few steps, as one number, on any number of processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.collectives import host_collectives
from autopar.runtime.pipeline.gradient_fold import GradientFold
from tests.distributed.captured_once import capture_once, compile_once, prepared_by

SHARDS = 8
BATCH, WORDS, SEQUENCE, WIDTH = 16, 23, 5, 14
NAME = "logical shards"


class Tied(nn.Module):
    """What adds up over samples in several ways: tied weights, a norm, dropout, labels that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        hidden = hidden + F.dropout(self.down(F.gelu(self.up(self.norm(hidden)))), 0.2, self.training)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Tokens, and labels of which a third is ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, WORDS, (BATCH, SEQUENCE), generator=generator) for _ in range(2))
    labels[torch.rand(BATCH, SEQUENCE, generator=generator) < 0.3] = -100
    return {"tokens": tokens, "labels": labels}


def captured(runs: Sequence[Mapping[str, Any]], processes: int) -> bool:
    """Capture the model whole, as one logical shard and as the micro-batch of a process."""
    made = False
    for precision in {run.get("precision") for run in runs}:
        for parts in {SHARDS, SHARDS // processes}:
            made |= capture_once(f"{NAME} {precision}", Tied(), batch(0), parts=parts, precision=precision)
    return made


@prepared_by(captured)
def hashes(runs: Sequence[Mapping[str, Any]], processes: int) -> list[list[str]]:
    """Of each of the runs (`weights_behind`)."""
    return [weights_behind(processes, **run) for run in runs]


def weights_behind(
    processes: int,
    axis: str | None = None,
    precision: str | None = None,
    zero_1: bool = False,
    mutations: Sequence[str] = (),
) -> list[str]:
    """A hash of losses, norms and weights behind some steps, and those of the same steps under each mutation."""
    torch.manual_seed(0)
    model, options = Tied(), {"precision": precision, "deterministic": SHARDS}
    dims = None if axis is None else {axis: processes}
    if zero_1:
        options["plan"] = _as_zero_1(dims)
    else:
        options |= {"optimizer": torch.optim.AdamW, "dims": dims, "mode": "fast"}
    module = compile_once(f"{NAME} {precision}", model, batch(0), **options)
    assert module.plan.micro_batches == SHARDS // processes
    weights, found = module.full_state_dict(), []
    for mutation in ("", *mutations):
        module.load_state_dict(weights)
        module.calls = 0  # its random numbers begin again
        with _mutated(mutation):
            found.append(_trained(module))
    return found


def _trained(module: autopar.ParallelModule) -> str:
    """Losses are scaled and gradients clipped."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    said = []
    for seed in range(2):
        optimizer.zero_grad()
        loss = module(**batch(seed))
        (loss / 3.0).backward()
        said += [loss.item(), autopar.clip_grad_norm_(module.parameters(), 0.5).item()]
        optimizer.step()
    found = hashlib.sha256(repr(said).encode())
    for _, weight in sorted(module.full_state_dict().items()):
        found.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _as_zero_1(dims: Mapping[str, int] | None) -> Plan:
    """ZeRO-3 in which gathered weights are kept: the state of the optimizer is what is split."""
    plan = autopar.plan(Tied(), batch(0), cluster="2 cpu", dims=dims, deterministic=SHARDS, mode="fast",
        with_baselines=False)
    kept = {name: replace(parameter, keep_gathered=True) for name, parameter in plan.parameters.items()}
    return replace(plan, parameters=kept, origin=None)


@contextmanager
def _mutated(mutation: str) -> Iterator[None]:
    """sums: over ranks one after the other, as libraries do. order: micro-batches one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        if mutation == "sums":
            reductions = dict(host_collectives.REDUCTIONS)
            reductions[host_collectives.FOLDED] = reductions["sum"]
            patch.setattr(host_collectives, "REDUCTIONS", reductions)
        if mutation == "order":
            patch.setattr(GradientFold, "add", _added_to_one_total)
        yield


def _added_to_one_total(fold: GradientFold, gradients: Sequence[torch.Tensor | None]) -> None:
    made = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
    kept = fold._kept[0][1] if fold._kept else {}
    fold._kept = [(SHARDS, {place: kept[place] + made[place] if kept else made[place] for place in made})]

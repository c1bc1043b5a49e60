"""Jobs of the workers: a decoder whose sequence is cut over ranks, in the loops that people write."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.layouts.placement import Shard
from autopar.plans.plan_value import RING
from autopar.request.axis_ways import ContextParallelism
from autopar.runtime.step import batches
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.training_jobs import full_gradients

BATCH, LENGTH, WORDS = 4, 16, 32


def decoder(seed: int = 0) -> LlamaForCausalLM:
    """Two layers, four heads of queries, two of keys."""
    torch.manual_seed(seed)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(**heads, hidden_size=16, intermediate_size=32, vocab_size=WORDS, use_cache=False)
    )


def tokens(seed: int, length: int = LENGTH) -> dict[str, Tensor]:
    """(BATCH, length), no position like another."""
    drawn = torch.randint(0, WORDS, (BATCH, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": drawn, "labels": drawn.flip(0)}


def captured(parts: int = 1, length: int = LENGTH, **_: Any) -> bool:
    """Capture the decoder, in micro-batches."""
    return capture_once(f"decoder of {length}", decoder(), tokens(0, length), parts=parts)


@prepared_by(captured)
def train(
    dims: dict[str, int],
    cp: ContextParallelism | None = None,
    mode: str = "global",
    parts: int = 1,
    length: int = LENGTH,
    path: str = "",
    zigzag: bool = False,
    planted: bool = False,
) -> dict[str, Any]:
    """Errors of two AdamW steps beside the plain model, and of one behind a checkpoint that other `dims` load.

    planted: the mutation, in which outputs come in the order of the ranks' rows.
    """
    pinned = {"*/attention#0": {"cp": "S(2, zigzag)"}} if zigzag else None
    module = _compiled(0, dims, length, cp=cp, batch=mode, micro_batches=parts, constraints=pinned)
    plain = decoder()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, plain)]
    errors: dict[str, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(batches, "in_zigzag", lambda whole, *_: whole)
        for step in range(2):
            _step(module, plain, optimizers, tokens(step, length), mode, f"step {step}", errors)
    if path:
        autopar.save(path, module, optimizers[0])
        other = _compiled(99, {"dp_shard": dist.get_world_size()}, length)
        optimizers[0] = torch.optim.AdamW(other.parameters(), lr=0.5)
        autopar.load(path, other, optimizers[0])
        _step(other, plain, optimizers, tokens(2, length), "global", "loaded", errors)
    ring = any(operator.implementation == RING for operator in module.plan.operators.values())
    return {**errors, "zigzag": _zigzag(module), "ring": ring}


@prepared_by(captured)
def verified(dims: dict[str, int], cp: ContextParallelism, parts: int = 1) -> float:
    """The worst gradient error that verify reports."""
    result = autopar.verify(_compiled(0, dims, cp=cp, micro_batches=parts), tokens(1))
    return result.gradients[result.worst]


def _compiled(seed: int, dims: dict[str, int], length: int = LENGTH, **options: Any) -> autopar.ParallelModule:
    return compile_once(f"decoder of {length}", decoder(seed), tokens(0, length), dims=dims, **options)


def _step(
    module: autopar.ParallelModule,
    plain: nn.Module,
    optimizers: list[torch.optim.AdamW],
    batch: dict[str, Tensor],
    mode: str,
    name: str,
    errors: dict[str, float],
) -> None:
    index, count = module.data_shard() if mode == "local" else (0, 1)
    out, wanted = module(**{key: value.chunk(count)[index] for key, value in batch.items()}), plain(**batch)
    mine = wanted["logits"].chunk(count)[index]
    errors[f"{name}: loss"] = abs(float(out["loss"].detach()) - float(wanted["loss"].detach()))
    errors[f"{name}: logits"] = float((out["logits"].detach() * 1 - mine.detach()).abs().max())
    out["loss"].backward()
    wanted["loss"].backward()
    errors[f"{name}: gradients"] = _gradient_error(module, plain)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _gradient_error(module: autopar.ParallelModule, plain: nn.Module) -> float:
    """max |dg| / |g| over the parameters that this rank's stages hold."""
    mine, wanted = full_gradients(module), full_gradients(plain)
    assert mine.keys() == dict(module.named_parameters()).keys()
    return max(float((found - wanted[name]).norm() / wanted[name].norm()) for name, found in mine.items())


def _zigzag(module: autopar.ParallelModule) -> bool:
    """Whether the plan holds activations in zigzag order."""
    operators = module.plan.operators.values()
    layouts = itertools.chain.from_iterable((*operator.inputs, *operator.outputs) for operator in operators)
    return any(isinstance(each, Shard) and each.zigzag for layout in layouts if layout for each in layout)

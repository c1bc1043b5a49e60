"""What the golden files show: a model, a cluster by its name (never this machine), a question and some ranks each.

Questions pin the axes, so that the files show what is made of a question and take little time; only "stack-free" is
searched. Where kernels, buckets or chunks pay on large tensors alone, the model is large and has no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.demo.gpt import GPT, GPTConfig
from tests.capture.expert_models import Mixture, one_hot
from tests.golden.models import GroupedQueries, Pictures, Stack, TiedStack, TiedWithDropout, rows, tokens

Called = tuple[nn.Module, tuple[Tensor, ...]]
"""A model and what it is called with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """planner, question: arguments of `autopar.Planner` and its `plan`; ranks: those whose programs are shown."""

    build: Callable[[], Called]
    cluster: str
    question: Mapping[str, Any]
    planner: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (0,)


def _gpt() -> Called:
    return GPT(GPTConfig(vocabulary=32, positions=8, width=16, heads=4, layers=1)), tokens(8, 8)


def _llama() -> Called:
    return GroupedQueries(vocabulary=32, width=16, heads=4, hidden=24), tokens(8, 8)


def _large_llama() -> Called:
    with torch.device("meta"):
        return GroupedQueries(vocabulary=32000, width=1024, heads=8, hidden=2816), tokens(16, 512)


def _large_stack(layers: int, batch: int, width: int) -> Called:
    with torch.device("meta"):
        return Stack(layers, width), rows(batch, width)


CASES: Mapping[str, Case] = {
    "stack-free": Case(
        build=lambda: _large_stack(1, 8192, 1024), cluster="4 H100-SXM", question={"with_baselines": True}
    ),
    "stack-uneven": Case(
        build=lambda: (Stack(1), rows(10)), cluster="3 cpu", question={"dims": {"tp": 3}}, ranks=(0, 2)
    ),
    "stack-chunks": Case(
        build=lambda: _large_stack(1, 16384, 4096),
        cluster="4 H100-SXM",
        planner={"precision": "bf16"},
        question={"dims": {"tp": 4}},
    ),
    "gpt-ddp": Case(build=_gpt, cluster="4 cpu", question={"dims": {"dp_replicate": 4}}),
    "gpt-zero3-tp": Case(build=_gpt, cluster="4 H100-SXM", question={"dims": {"dp_shard": 2, "tp": 2}}, ranks=(3,)),
    "llama-three-axes-bf16": Case(
        build=_llama,
        cluster="2x4 A100-80",
        planner={"precision": "bf16"},
        question={"dims": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}},
    ),
    "llama-kernels-buckets": Case(
        build=_large_llama,
        cluster="4 H100-SXM",
        planner={"precision": "bf16"},
        question={"dims": {"dp_shard": 4}},
    ),
    "pictures": Case(
        build=lambda: (Pictures(), (torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))),
        cluster="4 cpu",
        question={"dims": {"dp_shard": 2, "tp": 2}},
    ),
    "experts": Case(
        build=lambda: (Mixture(one_hot), tokens(4, 6)), cluster="4 H100-SXM", question={"dims": {"dp_shard": 4}}
    ),
    "tied-dropout": Case(
        build=lambda: (TiedWithDropout(), tokens(8, 6)),
        cluster="4 H100-SXM",
        question={"dims": {"dp_replicate": 2, "tp": 2}},
        ranks=(3,),
    ),
    "tied-dropout-micro-batches-recomputed": Case(
        build=lambda: (TiedWithDropout(), tokens(8, 6)),
        cluster="2 H100-SXM",
        question={"dims": {"dp_shard": 2}, "micro_batches": 2, "recompute": "full"},
        ranks=(1,),
    ),
    "stages-1f1b": Case(
        build=lambda: (TiedStack(2), tokens(16, 4)),
        cluster="4 H100-SXM",
        question={"dims": {"pp": 2, "dp_shard": 2}, "micro_batches": 4, "schedule": "1f1b"},
        ranks=(0, 2),
    ),
    "stages-zb-h1": Case(
        build=lambda: (Stack(2), rows(16)),
        cluster="4 H100-SXM",
        question={"dims": {"pp": 2, "tp": 2}, "micro_batches": 4, "schedule": "zb-h1"},
        ranks=(0, 2),
    ),
    "stages-interleaved": Case(
        build=lambda: (Stack(4), rows(16)),
        cluster="2 cpu",
        question={"dims": {"pp": 2}, "micro_batches": 4, "schedule": "interleaved"},
        ranks=(0,),
    ),
    "stages-unequal": Case(
        build=lambda: _large_stack(3, 24576, 1024),
        cluster="4 H100-SXM",
        question={"dims": {"pp": [1, 3]}, "micro_batches": 2},
        ranks=(0, 3),
    ),
}

"""Everybody else's plans, each as its own project runs it: a plain model and the global batch in, a step function out.

BASELINES["fsdp2"].build(model, inputs, ranks=4).step()
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from benchmarks.plan_quality.baselines import alone, data_parallel, pipelining
from benchmarks.plan_quality.baselines.tensor_parallel import no_styles, tp, tp_ddp, tp_fsdp2
from benchmarks.plan_quality.baselines.trained import Trained
from benchmarks.plan_quality.settings import Inputs


def always(model: nn.Module) -> None:
    """Any model will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """build: (plain model, global batch, ranks) -> what this rank trains; why_not: the reason where a model cannot be
    expressed; plan: in words."""

    plan: str
    build: Callable[[nn.Module, Inputs, int], Trained]
    why_not: Callable[[nn.Module], str | None] = always


FOUR_STAGES = functools.partial(pipelining.why_not, stages=4)
TWO_STAGES = functools.partial(pipelining.why_not, stages=2)

BASELINES: Mapping[str, Baseline] = {
    "ddp": Baseline(plan="DistributedDataParallel", build=data_parallel.ddp),
    "zero1": Baseline(plan="DDP with ZeroRedundancyOptimizer", build=data_parallel.zero1),
    "fsdp2": Baseline(plan="FSDP2 fully_shard per layer, resharded after forward", build=data_parallel.fsdp2),
    "fsdp2-kept": Baseline(plan="FSDP2 fully_shard per layer, kept after forward", build=data_parallel.fsdp2_kept),
    "hsdp": Baseline(plan="FSDP2 sharded over 2, replicated over the rest", build=data_parallel.hsdp),
    "hsdp-kept": Baseline(plan="HSDP, kept after forward", build=data_parallel.hsdp_kept),
    "tp": Baseline(plan="DTensor parallelize_module", build=tp, why_not=no_styles),
    "tp-ddp": Baseline(plan="DTensor over 2 x DDP", build=tp_ddp, why_not=no_styles),
    "tp-fsdp2": Baseline(plan="DTensor over 2 x FSDP2", build=tp_fsdp2, why_not=no_styles),
    "1f1b": Baseline(plan="pipelining 1F1B", build=pipelining.one_f_one_b, why_not=FOUR_STAGES),
    "1f1b-ddp": Baseline(plan="pipelining 1F1B of 2 x DDP", build=pipelining.one_f_one_b_ddp, why_not=TWO_STAGES),
    "alone": Baseline(plan="one rank; the others idle", build=alone.alone),
}

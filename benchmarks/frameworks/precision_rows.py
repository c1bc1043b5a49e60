"""Rows of precision: autocast, GradScaler, fp32 masters and bf16 weights in a plain loop, under plans of every kind.

Losses are compared with those of `torch.autocast`, or of bf16 weights, on one process. The scaler overflows once at
its first scale, and grows afterwards: its scale and the skipped steps are compared, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.frameworks.framework_row import row
from benchmarks.frameworks.plain_loop import clip_by_autopar, clip_by_torch, looped

PLANS: tuple[dict[str, Any], ...] = tuple({"dims": {name: 2}} for name in ("dp_replicate", "dp_shard", "tp", "pp"))
DP, FSDP, TP, PP = PLANS
SCALER: dict[str, Any] = {"init_scale": 2.0**100, "backoff_factor": 2.0**-86, "growth_interval": 20}
HALVES: dict[str, Any] = {"dtype": torch.bfloat16, "settings": {"lr": 0.05}}
WIDE_SCALER: dict[str, Any] = {**SCALER, "init_scale": 2.0**127, "backoff_factor": 2.0**-113}
"""Overflows once in fp32."""
single: Any = partial(looped, settings={"lr": 0.1}, dtype=torch.float32)

wide: Any = partial(looped, settings={"lr": 0.02}, dtype=torch.float32, scaler=WIDE_SCALER)

ROWS = (
    row("precision", "autocast bf16", partial(single, autocast="bf16", **DP), precision="bf16"),
    row("precision", "autocast bf16, sharded", partial(single, autocast="bf16", **FSDP), precision="bf16"),
    row("precision", "autocast bf16, tensor parallelism", partial(single, autocast="bf16", **TP), precision="bf16"),
    row("precision", "autocast fp16, GradScaler", partial(single, autocast="fp16", scaler=SCALER, told=False, **FSDP),
        precision="fp16"),
    row("precision", "GradScaler, unscale_ and clip", partial(single, autocast="fp16", scaler=SCALER, told=False,
        clip=clip_by_torch, **TP), precision="fp16"),
    row("precision", "GradScaler in fp32", partial(wide, told=False, clip=clip_by_torch, **FSDP)),
    row("precision", "GradScaler in two stages", partial(single, autocast="fp16", scaler=SCALER, clip=clip_by_autopar,
        **PP), precision="fp16", change="compile(scaler=scaler)"),
    row("precision", "GradScaler that two stages are not told of", partial(single, autocast="fp16", scaler=SCALER,
        told=False, **PP), precision="fp16", refused=r"pass the scaler to autopar\.compile"),
    row("precision", "GradScaler in fp32, two stages", partial(wide, told=False,
        scaler={"init_scale": 2.0**14, "growth_interval": 20}, **PP)),
    row("precision", "the scaler's state saved", partial(single, autocast="fp16", scaler=SCALER, resumed=True, **FSDP),
        precision="fp16", change='save(..., extra={"scaler": scaler})'),
    row("precision", "fp32 masters, bf16", partial(single, precision="bf16", **FSDP), precision="bf16",
        change='precision="bf16"'),
    row("precision", "fp32 masters, fp16 and GradScaler", partial(single, precision="fp16", scaler=SCALER, **FSDP),
        precision="fp16", change='precision="fp16"'),
    row("precision", "fp32 masters, bf16 sums", partial(single, precision="bf16", reduce_dtype="bf16", **DP),
        precision="bf16", change='reduce_dtype="bf16"'),
    row("precision", "bf16 weights", partial(looped, **HALVES, **FSDP), precision="bf16"),
    row("precision", "bf16 weights, fp32 sums", partial(looped, **HALVES, reduce_dtype="fp32", **FSDP),
        precision="bf16", change='reduce_dtype="fp32"'),
    row("precision", "bf16 weights, fp32 sums of micro-batches", partial(looped, **HALVES, reduce_dtype="fp32",
        micro_batches=2, **DP), precision="bf16", change='reduce_dtype="fp32"'),
    row("precision", "bf16 weights, fp32 sums in two stages", partial(looped, **HALVES, reduce_dtype="fp32", **PP),
        precision="bf16", change='reduce_dtype="fp32"'),
    row("precision", "sums in a dtype that is not there", partial(single, reduce_dtype="fp8", **DP),
        refused="reduce_dtype='fp8' is unknown"),
)  # fmt: skip

"""Rows of torchao's optimizers: moments of 8 and 4 bits, and weights of bf16 that are rounded at random.

torchao compiles its updates; a C++ compiler has to be there. It keeps blocks of fewer than 4,096 elements of a rank in
their dtype, so that split weights have fewer narrow moments than whole ones; 4 bits are compared on whole ones, without
the files in which torch keeps compiled programs: it takes that of a plain state of 4 bits for that of a DTensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torchao.optim import Adam8bit, AdamW4bit, AdamW8bit, _AdamW

from benchmarks.frameworks.framework_row import Run, row
from benchmarks.frameworks.plain_loop import looped

PLANS: tuple[dict[str, Any], ...] = tuple({"dims": {name: 2}} for name in ("dp_replicate", "dp_shard", "tp", "pp"))
DP, FSDP, TP, PP = PLANS
rounded: Any = partial(
    looped, optimizer=partial(_AdamW, bf16_stochastic_round=True), settings={"lr": 1e-3}, dtype=torch.bfloat16
)
narrow: Any = partial(looped, settings={"lr": 1e-3}, dtype=torch.float32)

UNCACHED = "torch._inductor.config.force_disable_caches = True"


def uncached(*arguments: Any, **options: Any) -> Run:
    with torch._inductor.config.patch(force_disable_caches=True):
        return narrow(*arguments, **options)  # type: ignore[no-any-return]


ROWS = (
    row("torchao", "AdamW8bit", partial(narrow, optimizer=AdamW8bit, **DP), precision="bf16"),
    row("torchao", "AdamW8bit, sharded", partial(narrow, optimizer=AdamW8bit, **FSDP), precision="bf16"),
    row("torchao", "AdamW8bit, tensor parallelism", partial(narrow, optimizer=AdamW8bit, **TP), precision="bf16"),
    row("torchao", "Adam8bit, two stages", partial(narrow, optimizer=Adam8bit, **PP), precision="bf16"),
    row("torchao", "AdamW4bit", partial(uncached, optimizer=AdamW4bit, **DP), precision="bf16", change=UNCACHED),
    row("torchao", "AdamW8bit, saved", partial(narrow, optimizer=AdamW8bit, resumed=True, **FSDP), precision="bf16"),
    row("torchao", "stochastic rounding", partial(rounded, **DP), precision="bf16"),
    row("torchao", "stochastic rounding, sharded", partial(rounded, **FSDP), precision="bf16"),
    row("torchao", "stochastic rounding, tensor parallelism", partial(rounded, **TP), precision="bf16"),
    row("torchao", "stochastic rounding, a weight of two stages", partial(rounded, **PP), precision="bf16",
        refused="stands in several stages"),
)  # fmt: skip

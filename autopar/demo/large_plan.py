"""First half of the demo: a plan of a GPT for sixteen GPUs that are not here, two nodes on a slow network."""

from __future__ import annotations

import torch

from autopar.api import plan
from autopar.demo.gpt import GPT, GPTConfig
from autopar.plans.parallel_plan import Plan

CLUSTER = "2x8 A100-80 @ 25Gb"
LARGE = GPTConfig(vocabulary=50304, positions=2048, width=4096, heads=32, layers=8)
LARGE_BATCH = 64
TITLE = f"GPT 1.8 B, {LARGE_BATCH} sequences of {LARGE.positions}, bf16, AdamW on {CLUSTER}"


def build() -> tuple[GPT, dict[str, torch.Tensor]]:
    """`LARGE` in bf16 and a batch of 64 sequences, both on meta: nothing is allocated."""
    with torch.device("meta"):
        model = GPT(LARGE).to(torch.bfloat16)
        tokens = torch.empty(LARGE_BATCH, LARGE.positions, dtype=torch.int64)
    return model, {"tokens": tokens, "labels": tokens}


def plan_large_gpt() -> Plan:
    """The plan of `LARGE` with AdamW."""
    model, inputs = build()
    return plan(model, inputs, cluster=CLUSTER, optimizer=torch.optim.AdamW)

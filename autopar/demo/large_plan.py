"""First half of the demo: plan a GPT of 1.3 billion parameters for sixteen H100 that are not here."""

from __future__ import annotations

import torch

from autopar.api import plan
from autopar.demo.gpt import GPT, GPTConfig
from autopar.plans.parallel_plan import Plan

CLUSTER = "2x8 H100-SXM"
LARGE = GPTConfig(vocabulary=50304, positions=2048, width=2048, heads=16, layers=24)
LARGE_BATCH = 64


def plan_large_gpt() -> Plan:
    """The plan of `LARGE` in bf16 with AdamW at a global batch of 64 sequences. Allocates no weights."""
    with torch.device("meta"):
        model = GPT(LARGE).to(torch.bfloat16)
        tokens = torch.empty(LARGE_BATCH, LARGE.positions, dtype=torch.int64)
    inputs = {"tokens": tokens, "labels": tokens}
    return plan(model, inputs, cluster=CLUSTER, optimizer=torch.optim.AdamW)

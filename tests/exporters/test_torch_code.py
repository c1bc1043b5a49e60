"""How layers are cut by torch's own styles, and what these cannot say."""

from __future__ import annotations

import torch

import autopar
from autopar.exporters.torch_code import layer_styles
from autopar.plans.parallel_plan import Plan
from benchmarks.models import LossOnly, llama


def _plan(kernels: tuple[str, ...]) -> Plan:
    tokens = torch.zeros(4, 32, dtype=torch.long)
    model = LossOnly(llama(layers=1, width=32, hidden=64, heads=4, kv_heads=4, vocabulary=4096, positions=32))
    found = autopar.plan(
        model, {"input_ids": tokens, "labels": tokens}, cluster="1x2 H100-SXM", dims={"tp": 2}, kernels=kernels,
        mode="fast", constraints={"model.lm_head.weight": "S(0)"}, with_baselines=False,
    )  # fmt: skip
    assert isinstance(found, Plan)
    return found


def test_a_head_inside_of_the_loss_is_lost_with_the_way_out() -> None:
    plan = _plan(("cross_entropy", "linear_cross_entropy"))
    styles, lost = layer_styles(plan)
    assert "model.lm_head" not in styles
    assert ["linear_cross_entropy#0 holds the product" in one for one in lost] == [True]
    assert "kernels=" in lost[0]
    styles, lost = layer_styles(_plan(("cross_entropy",)))
    assert styles["model.lm_head"] == "columns"
    assert lost == []

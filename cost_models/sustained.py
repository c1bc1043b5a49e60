"""What kernels reach in a training step and not in a benchmark: clocks under load, and the attention kernel that runs.

A benchmark times one kernel for milliseconds. A step keeps the device busy for seconds, until its power limit lowers
the clock; and the software of a run may call another attention kernel than the vendor's, which the curves describe.

    products in a step       seconds / SUSTAINED_FRACTION["H100-SXM"]         794 -> 699 TFLOP/s bf16
    FlashAttention-2, H100   seconds / ATTENTION_SPEED["flash2"]["Hopper"]    its instructions reach 62 % of the rate
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from autopar.cost_models.operators_gemm import Rates
from autopar.hardware.device_curves import DeviceCurves

AttentionKernel = Literal["vendor", "flash2", "flash1"]

_HOPPER_FRACTION = 0.88
"""Fitted on every third H100 row of mosaicml/llm-foundry's FSDP benchmarks, where products are most of the time."""

SUSTAINED_FRACTION: Mapping[str, float] = {
    "H100-SXM": _HOPPER_FRACTION,
    "H200-SXM": _HOPPER_FRACTION,
    "H800-SXM": _HOPPER_FRACTION,
    "GH200": _HOPPER_FRACTION,
    # 500 W instead of 700: power grows with the third power of the clock, so (5/7)^(1/3) of the SXM's 794.5 TFLOP/s
    "H100-96": _HOPPER_FRACTION * (500 / 700) ** (1 / 3) * 794.5 / 732.6,
}
"""Part of the best measured matmul rate that a step keeps up; devices outside of the table keep it all (A100: runs of
llm-foundry and Megatron show no loss)."""

ATTENTION_SPEED: Mapping[AttentionKernel, Mapping[str, float]] = {
    "flash2": {"Hopper": 0.62, "Blackwell": 0.62},
    "flash1": {"Ampere": 0.62, "Hopper": 0.39},
}
"""By generation, against the vendor's fused kernel. flash2: causal forward and backward of 512 to 16,384 tokens,
Dao-AILab/flash-attention assets/flash2_h100_fwd_bwd_benchmark.png @0251105 (Blackwell: assumption, the same
instructions). flash1: the same figures say 0.50 and 0.31; the Triton version of llm-foundry's runs is 1.25 times as
fast, fitted on its A100 rows of 16,384 and 32,768 tokens."""


def sustained_fraction(curves: DeviceCurves) -> float:
    """Part of the best matmul rate that a busy device keeps. The ablation ("physics") knows no fitted constant."""
    return 1.0 if curves.tier == "physics" else SUSTAINED_FRACTION.get(curves.name, 1.0)


def sustained(rates: Rates, curves: DeviceCurves) -> Rates:
    """The rates of a device that has been busy for seconds."""
    return replace(rates, flops_per_second=rates.flops_per_second * sustained_fraction(curves))


def attention_speed(kernel: AttentionKernel, curves: DeviceCurves) -> float:
    """Rate of an attention kernel against the vendor's on this device."""
    if curves.tier == "physics":
        return 1.0
    return ATTENTION_SPEED.get(kernel, {}).get(curves.generation, 1.0)

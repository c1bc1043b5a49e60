"""Step rates: what a plan does in a second, beside how long its step takes.

rates = step_rates(plan)
rates.per_second(0.989), rates.unit, rates.of_peak(0.989)         531200.0, "tokens", 0.41
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.plans.plan_value import PlanValue
from autopar.plans.planned_cluster import cluster_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """What stands behind one step. count: of `unit` ("tokens" or "samples") that it takes, None where the question does
    not say; flops: of the model, forward and backward, nothing counted twice; dtype: of most of them; peak: FLOP/s of
    all devices by their fastest product measured in `dtype`, None where the cluster is not known; device: "GPU" or
    "device"."""

    count: int | None
    unit: str
    flops: float | None
    peak: float | None
    dtype: str
    device: str

    def per_second(self, seconds: float) -> float | None:
        """Tokens or samples per second of all devices, where a step takes so many seconds."""
        return None if self.count is None or not seconds else self.count / seconds

    def of_peak(self, seconds: float) -> float | None:
        """Model FLOPs utilisation (MFU): the share of the peak."""
        return None if self.flops is None or not self.peak or not seconds else self.flops / seconds / self.peak


def step_rates(plan: PlanValue) -> StepRates:
    """What a step of the plan takes and computes, as far as the plan says it."""
    count, unit = _counted(plan)
    cluster, flops = cluster_of(plan), plan.statistics.get("flops_of_pass")
    dtype = str(plan.statistics.get("dtype_of_flops") or ("bfloat16" if plan.is_in_bf16 else "float32"))
    ceiling = None if cluster is None else cluster.device.flops_per_second.get(dtype)
    return StepRates(
        count=count,
        unit=unit,
        flops=flops * plan.micro_batches if isinstance(flops, int | float) else None,
        peak=None if ceiling is None else ceiling * plan.num_ranks,
        dtype=dtype,
        device="GPU" if cluster is not None and cluster.device.kind == "cuda" else "device",
    )


def _counted(plan: PlanValue) -> tuple[int | None, str]:
    """How many tokens a step takes, where an input holds whole numbers in rows; else how many samples."""
    said = plan.question.get("inputs")
    entries = list(said.values()) if isinstance(said, dict) else []
    for shape, dtype in entries:
        if len(shape) == 2 and "int" in dtype:
            return math.prod(shape), "tokens"
    return next((shape[0] for shape, _ in entries if shape), None), "samples"

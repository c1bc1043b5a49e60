"""The plans that are compared: the pipeline that autopar picks, the best plan without one, and data parallelism, whose
traffic is heavy enough to be counted."""

from __future__ import annotations

from collections.abc import Callable

import torch

import autopar
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from benchmarks.netlab.pipelines.settings import Setting

PIPELINE, WITHOUT, DATA_PARALLEL = "pipeline", "without", "data parallel"
GROUPS = (4, 2)
"""Sizes of "pp" that are pinned where the free search keeps no pipeline."""


def make_plans(setting: Setting, cluster: Cluster, log: Callable[[str], None]) -> dict[str, Plan]:
    """By name; `without` has one micro-batch, which rules stages out."""
    model, inputs = setting.model_and_inputs()

    def planned(**wishes: object) -> Plan:
        return autopar.plan(model, inputs, cluster=cluster, optimizer=torch.optim.SGD, mode="fast", **wishes)  # type: ignore[arg-type]

    free = planned()
    plans = {PIPELINE: free if free.pipeline is not None else best_pinned(planned, log)}
    plans[WITHOUT] = planned(micro_batches=1)
    plans[DATA_PARALLEL] = planned(dims={"dp_replicate": cluster.num_devices}, micro_batches=1)
    return plans


def best_pinned(planned: Callable[..., Plan], log: Callable[[str], None]) -> Plan:
    """The pipeline with the shortest predicted step."""
    found = []
    for groups in GROUPS:
        try:
            found.append(planned(dims={"pp": groups}))
        except AutoparError as reason:
            log(f"pp={groups}: {reason}")
    return min(found, key=lambda plan: plan.predicted.step_seconds)

"""autopar: an auto-parallelization compiler for PyTorch.

module = autopar.compile(model, example_inputs, optimizer=torch.optim.AdamW)
plan = autopar.plan(model, example_inputs, cluster="2x8 H100-SXM")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from autopar.errors import (
    AutoparError,
    CaptureError,
    ConfigurationError,
    GradientError,
    InfeasibleError,
    PlanMismatchError,
    RankLostError,
    RankMismatchError,
    UnsupportedOperatorError,
    VerificationError,
)
from autopar.explain.alone import FileAlone
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Partial, Replicate, Shard
from autopar.plans.parallel_plan import Plan
from autopar.rules.registration import register_rule
from autopar.runtime.checkpoints.checkpoint import load, save
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.step_log import StepLog
from autopar.runtime.weights.clip_grad import clip_grad_norm_
from autopar.verification import Verification

if TYPE_CHECKING:
    from autopar.api import compile, plan, verify
    from autopar.explain.what_if import Planner

__all__ = [
    "AutoparError",
    "CaptureError",
    "Cluster",
    "ConfigurationError",
    "GradientError",
    "InfeasibleError",
    "ParallelModule",
    "Partial",
    "Plan",
    "PlanMismatchError",
    "Planner",
    "RankLostError",
    "RankMismatchError",
    "Replicate",
    "Shard",
    "StepLog",
    "UnsupportedOperatorError",
    "Verification",
    "VerificationError",
    "clip_grad_norm_",
    "compile",
    "load",
    "plan",
    "register_rule",
    "save",
    "verify",
]

LOADED_LATER = {
    "Planner": "autopar.explain.what_if",
    "compile": "autopar.api",
    "plan": "autopar.api",
    "verify": "autopar.api",
}
"""Public name -> its module, loaded where the name is first used: planning brings the solver library."""

Plan.without_origin = FileAlone()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in LOADED_LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(importlib.import_module(LOADED_LATER[name]), name)
        return found

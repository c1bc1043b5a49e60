"""autopar: an auto-parallelization compiler for PyTorch.

module = autopar.compile(model, example_inputs, optimizer=torch.optim.AdamW)
plan = autopar.plan(model, example_inputs, cluster="2x8 H100-SXM")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.errors import (
    AutoparError,
    BranchError,
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
from autopar.later import names_later

if TYPE_CHECKING:
    from autopar.api import compile, plan, verify
    from autopar.explain.what_if import Planner
    from autopar.hardware.cluster import Cluster
    from autopar.layouts.placement import Partial, Replicate, Shard
    from autopar.plans.parallel_plan import Plan
    from autopar.rules.registration import register_rule
    from autopar.runtime.checkpoints.checkpoint import load, save
    from autopar.runtime.checkpoints.checkpointer import Checkpointer
    from autopar.runtime.checkpoints.extra_state import PerDataRank
    from autopar.runtime.checkpoints.resharded import reshard
    from autopar.runtime.parallel_module import ParallelModule
    from autopar.runtime.step_log import StepLog
    from autopar.runtime.weights.clip_grad import clip_grad_norm_
    from autopar.verification import Verification

__all__ = [
    "AutoparError",
    "BranchError",
    "CaptureError",
    "Checkpointer",
    "Cluster",
    "ConfigurationError",
    "GradientError",
    "InfeasibleError",
    "ParallelModule",
    "Partial",
    "PerDataRank",
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
    "reshard",
    "save",
    "verify",
]

LOADED_LATER = {
    "Checkpointer": "autopar.runtime.checkpoints.checkpointer",
    "Cluster": "autopar.hardware.cluster",
    "ParallelModule": "autopar.runtime.parallel_module",
    "Partial": "autopar.layouts.placement",
    "PerDataRank": "autopar.runtime.checkpoints.extra_state",
    "Plan": "autopar.plans.parallel_plan",
    "Planner": "autopar.explain.what_if",
    "Replicate": "autopar.layouts.placement",
    "Shard": "autopar.layouts.placement",
    "StepLog": "autopar.runtime.step_log",
    "Verification": "autopar.verification",
    "clip_grad_norm_": "autopar.runtime.weights.clip_grad",
    "compile": "autopar.api",
    "load": "autopar.runtime.checkpoints.checkpoint",
    "plan": "autopar.api",
    "register_rule": "autopar.rules.registration",
    "reshard": "autopar.runtime.checkpoints.resharded",
    "save": "autopar.runtime.checkpoints.checkpoint",
    "verify": "autopar.api",
}
"""Public name -> its module, loaded where the name is first used: most bring torch, planning a solver library too."""

if not TYPE_CHECKING:
    __getattr__ = names_later(globals(), LOADED_LATER)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

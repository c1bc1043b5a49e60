"""Every stage of a planned pipeline, lowered for every rank of its group: no layout that the lowering refuses."""

from __future__ import annotations

import torch

from autopar.capture import Captures
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import is_legal
from autopar.passes.lowering.chain import lowered_step, sort_rows
from autopar.plans.parallel_plan import Plan
from autopar.questions import capture_model
from autopar.request import Request


def lower_every_stage(model: torch.nn.Module, tokens: torch.Tensor, plan: Plan) -> None:
    """tokens: int64 (micro-batch size, positions), inputs and targets of the model at once."""
    request = Request(cluster=Cluster.parse(f"{plan.num_ranks} cpu"))
    program = capture_model(model, (tokens, tokens), {}, request, Captures(), training=True).program
    for rank in range(plan.num_ranks):
        for stage in lowered_step(program, plan, rank, until=sort_rows).stages:
            for entry in stage.context.program.inputs:
                if entry.role == "parameter":
                    assert is_legal(entry.shape, stage.plan.parameters[entry.name].stored, stage.plan.mesh)

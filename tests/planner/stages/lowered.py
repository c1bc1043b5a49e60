"""Every stage of a planned pipeline, lowered for every rank of its group: no layout that the lowering refuses."""

from __future__ import annotations

import torch

from autopar.capture import Captures
from autopar.cluster import Cluster
from autopar.layouts.placement import is_legal
from autopar.parallel_plan import Plan
from autopar.passes.lower import lower
from autopar.passes.stage_plans import stage_plan
from autopar.passes.stages import cut_stages
from autopar.questions import Options, capture_program


def lower_every_stage(model: torch.nn.Module, tokens: torch.Tensor, plan: Plan) -> None:
    """tokens: int64 (micro-batch size, positions), inputs and targets of the model at once."""
    given = Options(cluster=Cluster.parse(f"{plan.num_ranks} cpu"))
    program = capture_program(model, (tokens, tokens), {}, True, given, Captures())
    assert plan.pipeline is not None
    ends = [stage.last_operator for stage in plan.pipeline.stages if stage.last_operator is not None]
    stages, schedule = cut_stages(program, ends), plan.pipeline.built(plan.micro_batches)
    for stage, part in enumerate(stages.programs):
        own = stage_plan(plan, stages, schedule, plan.pipeline.stages[stage].rank_group)
        for rank in range(own.mesh.size):
            lower(part, own, rank)
        for entry in part.inputs:
            if entry.role == "parameter":
                assert is_legal(entry.shape, own.parameters[entry.name].stored, own.mesh)

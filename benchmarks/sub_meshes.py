"""Sub-meshes of a model on a cluster, for benchmarks of the stage search.

shapes = sub_meshes(model, inputs, Cluster.parse("8x8 V100"), "14GiB"); tables = [sub.table for sub in shapes.of(64, 8)]
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from autopar.capture import Captures
from autopar.cluster import Cluster
from autopar.planner.constraints import parse_constraints
from autopar.planner.factorisation import Factorisation
from autopar.planner.optimizers import state_bytes
from autopar.planner.query import Query, budget, kernel_backend
from autopar.planner.search import search_of
from autopar.planner.stages.shapes import SubMeshes
from autopar.questions import Options, capture_at, capture_program
from benchmarks.models import Inputs


def sub_meshes(model: nn.Module, inputs: Inputs, cluster: Cluster, memory_limit: str | None = None) -> SubMeshes:
    """The model captured with AdamW, to be solved on sub-meshes. memory_limit: of a device."""
    options, captures = Options(cluster=cluster), Captures()
    program = capture_program(model, (), dict(inputs), True, options, captures)
    query = Query(
        program=program,
        cluster=cluster,
        state_bytes=state_bytes(program, torch.optim.AdamW, cluster.device.kind),
        constraints=parse_constraints(None, None),
        budget_bytes=budget(memory_limit, cluster),
        kernel_backend=kernel_backend(cluster),
        factorisation=Factorisation(program),
        search=search_of("default", None),
    )
    return SubMeshes(query, functools.partial(capture_at, program, model, (), dict(inputs), options, captures))

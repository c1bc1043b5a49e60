"""Sub-meshes of a model on a cluster, for benchmarks of the stage search.

shapes = sub_meshes(model, inputs, Cluster.parse("8x8 V100"), "14GiB"); tables = [sub.table for sub in shapes.of(64, 8)]
"""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import Captures
from autopar.hardware.cluster import Cluster
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.plan_pipeline import needed_recapture
from autopar.planner.pipelines.solved_submeshes import SubMeshes
from autopar.questions import capture_model
from autopar.request import Request
from benchmarks.models import Inputs


def sub_meshes(model: nn.Module, inputs: Inputs, cluster: Cluster, memory_limit: str | None = None) -> SubMeshes:
    """The model captured with AdamW, to be solved on sub-meshes. memory_limit: of a device."""
    request = Request(cluster=cluster, optimizer=torch.optim.AdamW, memory_limit=memory_limit)
    captured = capture_model(model, (), dict(inputs), request, Captures(), training=True)
    query = Query.of(captured.program, request, recapture=captured)
    return SubMeshes(query, needed_recapture(query))

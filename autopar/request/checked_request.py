"""Request: what a user asks beside a model and its inputs, checked once, when it is made.

    request = Request(cluster=Cluster.parse("8 H100-SXM"), memory_limit="40GiB", mode="fast")
    plan = make_plan(program, request)
    tighter = replace(request, memory_limit="20GiB")       # checked again

The arguments of `compile` and `plan`, of the command line and of `what_if` become one of these, and nothing else goes
from there to the planner. What it means for one program (bytes of states, a budget in bytes) is the planner's `Query`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from autopar.hardware.cluster import Cluster
from autopar.plans.capacity_factor import check_expert_capacity
from autopar.plans.logical_shards import Deterministic
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import ParameterPlan
from autopar.request.argument_types import ARGUMENT_TYPES, Branch, check_arguments
from autopar.request.axis_ways import ContextParallelism, ExpertParallelism, check_ways
from autopar.request.constraints import Recompute, check_recompute, parse_constraints
from autopar.request.equal_bits import check_equal_bits
from autopar.request.expert_load import ExpertLoad, check_expert_load, said_load
from autopar.request.kernel_kinds import check_kernels
from autopar.request.lossy import Lossy, check_lossy
from autopar.request.memory_limit import budget
from autopar.request.mesh_axes import EXPERT_AXIS, check_axes
from autopar.request.offload import Offload, check_offload
from autopar.request.pipeline_request import Dims, check_stages, pipeline_request, without_stages
from autopar.request.precision_name import check_precision, check_reduce_dtype, check_units
from autopar.request.replicated_experts import ReplicatedExperts, check_replicated
from autopar.request.search_mode import Mode, check_search

if TYPE_CHECKING:
    import torch

    from autopar.program import Program

LossFunction: TypeAlias = "Callable[[Any, Any], torch.Tensor]"
"""(output of the model, batch) -> 0-dim loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The fields are the arguments of `compile` under their names, but for three.

    parameter_layouts, expert_order: decisions for parameters that are kept, as where a module is planned anew for
    another input shape. with_baselines: whether the baselines are shown beside the answer.
    Raises ConfigurationError for what no model could be planned for: capturing one may take a minute.
    """

    cluster: Cluster
    loss_fn: LossFunction | None = None
    optimizer: Any = None
    mesh: Sequence[int] | None = None
    dims: Dims | None = None
    memory_limit: float | str | None = None
    constraints: Any = None
    parameter_layouts: Mapping[str, ParameterPlan] | None = None
    expert_order: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    precision: str | None = None
    reduce_dtype: str | None = None
    batch_dims: Mapping[str, int | None] | None = None
    differentiable: Sequence[str] = ()
    strict: bool = False
    discover: bool = False
    branches: Branch | None = None
    deterministic: Deterministic = False
    mode: Mode = "default"
    cache_dir: str | Path | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    recompute: Recompute | None = None
    offload: Offload | None = None
    lossy: Lossy | None = None
    kernels: Sequence[str] | None = None
    cp: ContextParallelism | None = None
    ep: ExpertParallelism | None = None
    expert_load: ExpertLoad | None = None
    expert_capacity: float | None = None
    replicated_experts: ReplicatedExperts | None = None
    time_limit: float | None = None
    warm_start: Plan | str | Path | None = None
    with_baselines: bool = True

    def __post_init__(self) -> None:
        check_arguments(**{each.name: getattr(self, each.name) for each in fields(self) if each.name in ARGUMENT_TYPES})
        check_search(self.mode, self.time_limit)
        check_precision(self.precision)
        check_units(self.precision, self.cluster.device)
        check_reduce_dtype(self.reduce_dtype)
        parse_constraints(self.constraints, self.parameter_layouts)
        budget(self.memory_limit, self.cluster)
        check_kernels(self.kernels)
        check_ways(self.dims, cp=self.cp, ep=self.ep)
        check_expert_load(self.expert_load)
        check_expert_capacity(self.ep, self.expert_capacity)
        has_axis = (self.dims or {}).get(EXPERT_AXIS, 1) != 1
        check_replicated(self.replicated_experts, self.ep, self.expert_load is not None, has_axis)
        if self.recompute is not None:
            check_recompute(self.recompute, "the plan")
        check_equal_bits(
            self.deterministic, self.cluster, self.mesh, self.dims, self.schedule, self.micro_batches
        )
        check_stages(self.cluster, self.mesh, self.dims, self.schedule)
        is_free = self.mesh is None and self.dims is None
        has_stages = not is_free and pipeline_request(self.cluster, self.mesh, self.dims, self.schedule) is not None
        check_offload(self.offload, self.cluster, has_stages)
        check_lossy(self.lossy, self.deterministic, has_stages)
        if not is_free and not has_stages:
            check_axes(self.cluster, self.mesh, without_stages(self.dims))

    def as_question(self, program: Program) -> dict[str, Any]:
        """What is asked about a program, as JSON values: what a plan file says of it before the planner's own words."""
        return {
            "inputs": {v.name: [list(v.shape), str(v.dtype)] for v in program.inputs if v.role == "input"},
            "mesh": None if self.mesh is None else list(self.mesh),
            "dims": None if self.dims is None else dict(self.dims),
            "precision": self.precision,
            **({} if self.reduce_dtype is None else {"reduce_dtype": self.reduce_dtype}),
            "micro_batches": self.micro_batches,
            **({} if self.offload is None else {"offload": self.offload}),
            **({} if self.lossy is None else {"lossy": self.lossy}),
            **({} if self.kernels is None else {"kernels": list(self.kernels)}),
            **({} if self.cp is None else {"cp": self.cp}),
            **({} if self.ep is None else {"ep": self.ep}),
            **({} if self.expert_load is None else {"expert_load": said_load(self.expert_load)}),
            **({} if self.expert_capacity is None else {"expert_capacity": self.expert_capacity}),
            **({} if self.replicated_experts is None else {"replicated_experts": self.replicated_experts}),
            "schedule": self.schedule,
            "deterministic": self.deterministic,
            "constraints": None if self.constraints is None else str(self.constraints),
            "branches": self.branches,
            "cluster_fingerprint": self.cluster.fingerprint,
        }

"""Query: what a request means for one program, in the planner's words: everything that a plan answers but the mesh.

query = Query.of(program, request)       state bytes, a budget in bytes, parsed constraints, limits of the search

It begins as the request says and is changed on the way (`replace`): sub-meshes of a pipeline have another cluster,
parts of the batch another program, baselines no constraints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.capture import fingerprint
from autopar.errors import ConfigurationError
from autopar.graphs.expert_capacity import with_expert_capacity
from autopar.graphs.expert_loads import expert_counts, with_expert_load
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.planner.batch.micro_batch_program import Recapture, RecaptureWithKernels, in_parts
from autopar.planner.batch.shard_layouts import ShardLayouts
from autopar.planner.one_mesh.choose_kernels import cheaper_kernels
from autopar.planner.problem.constraint_targets import BoundConstraint, bind_constraints, freed_axes
from autopar.planner.problem.factorisation import Factorisation
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.planner.problem.program_cache import ProgramCache
from autopar.planner.problem.search_limits import SEARCH, Search, search_of
from autopar.planner.solver.deadline import Deadline
from autopar.plans.logical_shards import Deterministic, num_shards
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram, Program
from autopar.request import Request
from autopar.request.constraints import Constraints, Recompute, parse_constraints
from autopar.request.expert_load import load_shares
from autopar.request.lossy import Lossy
from autopar.request.memory_limit import budget
from autopar.request.mesh_axes import AXIS_NAMES
from autopar.request.offload import Offload, may_wait, why_not
from autopar.request.replicated_experts import replicated_of_modules
from autopar.rules.alternatives import alternatives_offered

NO_DEADLINE = Deadline(at=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Everything that a plan answers, besides the mesh."""

    program: Program
    cluster: Cluster
    state_bytes: Mapping[str, StateBytes]
    constraints: Constraints
    budget_bytes: float
    kernel_backend: str
    factorisation: Factorisation
    search: Search
    bound_constraints: tuple[BoundConstraint, ...] = ()
    recompute: Recompute | None = None
    offload: Offload | None = None
    lossy: Lossy | None = None
    kernels: tuple[str, ...] = ()
    """Kinds of groups that are operators of ours in the program."""
    expert_load: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Module -> the part of its rows that each of its experts gets, where that is not even."""
    replicated_experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Module -> its experts of which every rank has a copy, where rows travel."""
    replicas_are_free: bool = False
    """Whether the search may choose these."""
    expert_order: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Module -> its experts in the order in which they lie on the ranks, where that is not the model's."""
    order_is_free: bool = False
    """Whether the search may choose it."""
    offered: frozenset[str] = frozenset()
    """Names of the operator alternatives that the search may choose wherever they are possible."""
    micro: MicroProgram | None = None
    micro_batches: int | None = None
    """In how many parts the user wants the batch; None: as memory asks."""
    deterministic: Deterministic = False
    shards: ShardLayouts | None = None
    """Where tensors lie if only the batch may be split, in logical shards; None: what splits is free."""
    gather_once: bool = False
    """Whether a step in parts gathers parameters, and scatters their gradients, once."""
    recapture: Recapture | None = None
    """Gives the program at another size of the batch; None: it is there at this one only."""
    hidden_share: float = 0.0
    """Part of the seconds of all communication of parameters that the objective leaves out
    (`hidden_communication.py`)."""
    stop_above: float = math.inf
    """Seconds of the sum of costs: a plan under the memory limit whose bound is above is of no interest."""
    deadline: Deadline = NO_DEADLINE
    warm_start: Plan | None = None
    kept: ProgramCache = field(default_factory=ProgramCache, compare=False)

    @property
    def fingerprint(self) -> str:
        """Of the program, read once."""
        found = self.factorisation.derived.get("fingerprint")
        if not isinstance(found, str):
            found = self.factorisation.derived["fingerprint"] = fingerprint(self.program)
        return found

    @staticmethod
    def of(
        program: Program, request: Request, *, recapture: Recapture | None = None, kept: ProgramCache | None = None
    ) -> Query:
        """What a request asks about a captured program; what is asked about further is the program with the kernels of
        ours that the request names, or that make it cheaper. kept: results of earlier questions about it; a time limit
        begins now.
        Raises ConfigurationError for constraints and optimizers that the program cannot have."""
        cluster, kept = request.cluster, kept or ProgramCache()
        backend = kernel_backend(cluster)
        kernels = request.kernels
        if kernels is None:
            asked = program, backend, cluster.device
            kernels = kept.kernels.recall(asked, lambda: cheaper_kernels(*asked))
        program = with_kernels(program, kernels)
        load = load_shares(request.expert_load, expert_counts(program.graph))
        replicated = replicated_of_modules(request.replicated_experts, load, expert_counts(program.graph))
        program = with_expert_load(program, load, replicated, request.expert_order)
        program = with_expert_capacity(program, request.expert_capacity)
        if recapture is not None:
            capacity = request.expert_capacity
            recapture = RecaptureWithKernels(
                recapture, tuple(kernels), load, replicated, request.expert_order, capacity
            )
        constraints = parse_constraints(request.constraints, request.parameter_layouts)
        constraints = replace(constraints, cp=request.cp, ep=request.ep)
        factorisation = kept.factorisations.recall(program, lambda: Factorisation(program))
        older = request.warm_start
        shards = _shards(program, request, recapture, factorisation)
        return Query(
            program=program,
            cluster=cluster,
            state_bytes=state_bytes(program, request.optimizer, cluster.device.kind),
            constraints=constraints,
            bound_constraints=bind_constraints(program, constraints, factorisation),
            budget_bytes=budget(request.memory_limit, cluster),
            kernel_backend=backend,
            kernels=tuple(kernels),
            expert_load=load,
            replicated_experts=replicated,
            replicas_are_free=request.replicated_experts is None and request.expert_capacity is None and not shards,
            expert_order=request.expert_order,
            order_is_free=not request.expert_order and request.expert_capacity is None and not shards,
            factorisation=factorisation,
            search=search_of(request.mode, request.time_limit),
            deadline=Deadline.after(request.time_limit),
            warm_start=Plan.load(older) if isinstance(older, str | Path) else older,
            recompute=request.recompute,
            offload=request.offload,
            lossy=request.lossy,
            offered=alternatives_offered(request.precision),
            micro_batches=request.micro_batches if shards is None else shards.count // cluster.num_devices,
            deterministic=request.deterministic if shards or not num_shards(request.deterministic) else True,
            shards=shards,
            recapture=recapture,
            kept=kept,
        )

    def placing(
        self, replicated: Mapping[str, tuple[int, ...]], order: Mapping[str, tuple[int, ...]]
    ) -> Query:
        """The question, of a program that says nothing of either, with these replicated experts and this order."""
        if (replicated, order) == (self.replicated_experts, self.expert_order):
            return self
        program, recapture = with_expert_load(self.program, self.expert_load, replicated, order), self.recapture
        if isinstance(recapture, RecaptureWithKernels):
            recapture = replace(recapture, replicated_experts=replicated, expert_order=order)
        factorisation = self.kept.factorisations.recall(program, lambda: Factorisation(program))
        return replace(
            self,
            program=program,
            replicated_experts=replicated,
            expert_order=order,
            factorisation=factorisation,
            bound_constraints=bind_constraints(program, self.constraints, factorisation),
            recapture=recapture,
        )

    @property
    def may_wait_on_host(self) -> frozenset[str]:
        """Of "activations" and "parameters" those that may wait in the memory of the host; none where it has none."""
        return frozenset() if why_not(self.cluster) else may_wait(self.offload)

    @property
    def gathers(self) -> int:
        """How often a step gathers what it gathers."""
        return 1 if self.micro is None or self.gather_once else self.micro.count

    def seconds_left(self) -> float | None:
        """What is left of the user's own time limit, in seconds by the clock; None without one."""
        left = self.deadline.left()
        return None if math.isinf(left) else left

    def in_parts(self, count: int, recapture: Recapture) -> MicroProgram:
        """The program in `count` parts of its batch. Raises NotSeparable."""
        return self.kept.parts.recall(
            (self.program, count), lambda: in_parts(self.program, count, recapture, self.factorisation)
        )

    def priced(self, mesh: Mesh) -> tuple[object, ...]:
        """What the priced problem on a mesh depends on, before the user's own constraints take choices away. They count
        only where they free an axis of what its name asks."""
        names_ask = {axis for axis, name in enumerate(mesh.axis_names) if name in AXIS_NAMES}
        names_ask |= set(range(len(mesh.shape))) if self.constraints.no_replicated_compute else set()
        freed = {node: names_ask & set(axes) for node, axes in freed_axes(self.bound_constraints, mesh).items()}
        question = replace(
            self,
            constraints=replace(self.constraints, placements={}, recompute={}),
            bound_constraints=(),
            budget_bytes=0.0,
            search=SEARCH["default"],
            stop_above=math.inf,
            deadline=NO_DEADLINE,
            warm_start=None,
            recompute=None,
            micro_batches=None,
            recapture=None,
            kept=ProgramCache(),
        )
        return mesh, question, {node: axes for node, axes in freed.items() if axes}


def _shards(
    program: Program, request: Request, recapture: Recapture | None, factorisation: Factorisation
) -> ShardLayouts | None:
    """Where tensors lie in the logical shards that a request asks for; what is not trained adds nothing up."""
    count = num_shards(request.deterministic)
    if not count or not program.training:
        return None
    if recapture is None:
        raise ConfigurationError(f"deterministic={count} needs the model at another batch; pass a recapture")
    return ShardLayouts.of(program, count, recapture, factorisation)


def kernel_backend(cluster: Cluster) -> str:
    """Who emits kernels: PyTorch eager on CPUs, inductor on CUDA."""
    return "eager" if cluster.device.kind == "cpu" else "inductor"

"""Plan: everything that was chosen, as a readable, editable file. Planner and runtime meet only here.

A plan names operators `module.path/op#k` (`/bwd` in backward), so it outlives torch's node names, and embeds the
question that it answers. Layouts are written as one string per mesh axis: `["S(0)", "R"]`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from autopar.errors import ConfigurationError
from autopar.files import write_atomically
from autopar.layouts.placement import Layout, Mesh, format_layout
from autopar.plan_answers import Comparison, Explanations, MemoryTable, RankProgram, from_plan_alone
from autopar.plan_entries import check_entries
from autopar.plan_json import UNWRITTEN, plain, read
from autopar.plan_text import matching_names, summary
from autopar.plan_versions import SCHEMA_VERSION, current
from autopar.schedules.actions import Schedule, parse_schedule
from autopar.schedules.check import check_schedule
from autopar.schedules.list_scheduler import TIMED_FAMILIES, build_schedule

PIPELINE_AXIS = "pp"
"""The first axis of the mesh of a plan with stages; layouts do not count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter: stored layout (`.grad` and optimizer state share it), layout in which operators find it,
    layout to which its gradient is reduced first, and whether the gathered weight is kept for backward (ZeRO-2-like)
    or gathered again (ZeRO-3). `shared_*`: the copy that all consumers of a phase share, as in `OperatorPlan`."""

    stored: Layout
    used: Layout
    gradient: Layout
    keep_gathered: bool = False
    shared_forward: Layout | None = None
    shared_backward: Layout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlan:
    """One operator: the name that each mesh axis splits (None: replicated, "partial": operands pass as Partial), the
    layouts of its tensor operands and outputs. `shared_forward` and `shared_backward` (one entry per output, None: no
    shared copy) are the layouts to which an output is redistributed once, for all its consumers of that phase.
    `recompute`: its outputs are computed again in backward instead of being saved."""

    axes: tuple[str | None, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    shared_forward: tuple[Layout | None, ...] = ()
    shared_backward: tuple[Layout | None, ...] = ()
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: a run of forward operators in the order of the program, and their backward. `last_operator` ends it
    (None: the end of forward); the ranks at coordinate `rank_group` of the axis "pp" run it (with a schedule in both
    directions micro-batch 0 of it, and the mirrored group, which holds it too, every other one)."""

    name: str
    last_operator: str | None
    rank_group: int
    gather_once: bool = False
    """Its parameters are gathered once per step, not per micro-batch, and their gradients scattered once, held whole
    till then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of one rank group where groups are unequal: neighbours from `first_rank` on, row-major on the axes of
    the plan's layouts in the sizes `shape`. The mappings hold what lies otherwise here than the plan says: parameters
    and inputs of several stages, and operators that several stages repeat."""

    first_rank: int
    shape: tuple[int, ...]
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    operators: Mapping[str, OperatorPlan] = field(default_factory=dict)
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    buffers: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Stages in the order of forward, and the schedule by which they take the plan's `micro_batches`: a family of
    `autopar.schedules` with `chunks` stages per rank group. `actions`: one line per rank group ("0F0,0F1,0B0") that
    takes the family's place; families whose order follows from the model's times need it. `groups`: where the rank
    groups are, if they are unequal; else they follow from the plan's mesh."""

    schedule: str
    chunks: int
    stages: tuple[StagePlan, ...]
    actions: tuple[str, ...] = ()
    groups: tuple[RankGroup, ...] = ()

    @property
    def cuts(self) -> tuple[str, ...]:
        """The forward operators that end the stages but the last."""
        return tuple(stage.last_operator for stage in self.stages if stage.last_operator is not None)

    def built(self, micro_batches: int) -> Schedule:
        """What every rank group computes. Raises ConfigurationError for actions that cannot run, or stages that the
        schedule places on other rank groups."""
        num_groups = 1 + max(stage.rank_group for stage in self.stages)
        if self.schedule in TIMED_FAMILIES and not self.actions:
            raise ConfigurationError(f"the order of {self.schedule} follows from times: the plan must list its actions")
        schedule = (
            parse_schedule("\n".join(self.actions))
            if self.actions
            else build_schedule(self.schedule, num_groups, micro_batches, self.chunks)
        )
        check_schedule(schedule)
        given = tuple(stage.rank_group for stage in self.stages)
        if schedule.route(0) != given or schedule.micro_batches != micro_batches:
            raise ConfigurationError(
                f"the schedule {self.schedule} runs {schedule.micro_batches} micro-batches with its stages on rank "
                f"groups {list(schedule.route(0))}; the plan has {micro_batches} and {list(given)}"
            )
        return schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of one step on one rank: seconds and peak bytes, with their parts."""

    step_seconds: float
    peak_bytes: float
    compute_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    bytes_by_kind: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A known plan (DDP, ZeRO-3, Megatron) or the best of another mesh, priced by the same model; `error` says why it
    is impossible. A mesh that was dropped unsolved has only `bound_seconds`: nothing on it is cheaper."""

    name: str
    dims: Mapping[str, int]
    objective_seconds: float | None = None
    bound_seconds: float | None = None
    predicted: Prediction | None = None
    error: str | None = None


class Origin(Protocol):
    """What a plan was made from: who asks it more than the plan itself says (`autopar.explain`)."""

    def explain(self, plan: Plan, names: Sequence[str], exact: bool) -> Explanations: ...

    def compare(self, plan: Plan, other: Plan | str) -> Comparison: ...

    def memory(self, plan: Plan, rank: int | None) -> MemoryTable: ...

    def what_if(self, plan: Plan, changes: Mapping[str, Any]) -> Plan: ...

    def edit(self, plan: Plan, changes: Mapping[str, Any]) -> Plan: ...

    def code(self, plan: Plan, rank: int) -> RankProgram: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """See the module docstring. `inputs` and `buffers` hold the layouts of data; `prices_hash` identifies the cost
    tables to which objective, bound and gap belong; `kernel_backend` says who writes the kernels, and `kernels` which
    kinds of groups run as a kernel of ours instead (`plan_entries.KERNELS`); `statistics` counts strategies, nodes and
    replicated FLOPs. `bucket_bytes` says up to which size collectives of a kind ("all_reduce") are joined, 0 or absent:
    not at all; where it is None, each is also awaited where it starts, which takes the least memory. `product_chunks`
    says into how many chunks of rows products are cut beside the collectives of a kind that bring or take these rows;
    absent: they stay whole. `hidden_share` is the part of the communication of parameters that objective, bound and gap
    leave out, as it runs beside computation. With `micro_batches` m, operators, inputs and outputs are those of a m-th
    of the batch, and a step runs them m times. With a `pipeline`, the first axis of the mesh is "pp" and every layout
    is one on the other axes (`layout_mesh`); with unequal rank groups the mesh is the smallest that holds the axes of
    each, and `num_ranks` counts devices."""

    mesh: Mesh
    parameters: Mapping[str, ParameterPlan]
    operators: Mapping[str, OperatorPlan]
    inputs: Mapping[str, Layout]
    buffers: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    predicted: Prediction
    objective_seconds: float
    bound_seconds: float
    gap: float
    fingerprint: str
    cluster: str
    profile: str
    kernel_backend: str = "eager"
    kernels: tuple[str, ...] = ()
    bucket_bytes: Mapping[str, float] | None = field(default_factory=dict)
    product_chunks: Mapping[str, int] = field(default_factory=dict)
    micro_batches: int = 1
    hidden_share: float = 0.0
    pipeline: PipelinePlan | None = None
    prices_hash: str = ""
    question: Mapping[str, Any] = field(default_factory=dict)
    baselines: tuple[Baseline, ...] = ()
    alternatives: tuple[Baseline, ...] = ()
    uncovered: Mapping[str, float] = field(default_factory=dict)
    statistics: Mapping[str, float | int | str] = field(default_factory=dict)
    explanations: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    origin: Origin | None = field(default=None, compare=False, repr=False, metadata={UNWRITTEN: True})
    """What made the plan, as long as it lives in the process that made it; a file has none (`Planner.bind`)."""

    @property
    def layout_mesh(self) -> Mesh:
        """The axes that layouts speak of: those of the mesh, without "pp" where there are stages."""
        if self.pipeline is None:
            return self.mesh
        return Mesh(self.mesh.axis_names[1:], self.mesh.shape[1:])

    @property
    def rank_groups(self) -> tuple[RankGroup, ...]:
        """The ranks at every coordinate of "pp"; one group where there are no stages."""
        if self.pipeline is not None and self.pipeline.groups:
            return self.pipeline.groups
        inner = self.layout_mesh
        count = 1 if self.pipeline is None else self.mesh.shape[0]
        return tuple(RankGroup(first_rank=group * inner.size, shape=inner.shape) for group in range(count))

    @property
    def num_ranks(self) -> int:
        """Devices that run the plan."""
        return sum(group.size for group in self.rank_groups)

    def group_of(self, rank: int) -> int:
        """The rank group of a rank. Raises ConfigurationError for a rank that the plan does not have."""
        for number, group in enumerate(self.rank_groups):
            if group.first_rank <= rank < group.first_rank + group.size:
                return number
        raise ConfigurationError(f"rank {rank}: the plan has the ranks 0 to {self.num_ranks - 1}")

    @property
    def recomputed(self) -> frozenset[str]:
        """Names of the operators whose outputs backward computes again."""
        return frozenset(name for name, operator in self.operators.items() if operator.recompute)

    def on_group(self, group: int) -> Plan:
        """What the ranks of one group go by: its own mesh without "pp", and its own layouts."""
        own = self.rank_groups[group]
        return replace(
            self,
            mesh=Mesh(self.layout_mesh.axis_names, own.shape),
            pipeline=None,
            parameters={**self.parameters, **own.parameters},
            operators={**self.operators, **own.operators},
            inputs={**self.inputs, **own.inputs},
            buffers={**self.buffers, **own.buffers},
            outputs={**self.outputs, **own.outputs},
        )

    @property
    def placements(self) -> dict[str, Layout]:
        """Parameter name -> stored layout."""
        return {name: parameter.stored for name, parameter in self.parameters.items()}

    def summary(self) -> str:
        """The plan on one page: itself beside the baselines, where its memory goes, the layouts of its parameters."""
        return summary(self)

    def explain(
        self, name: str | None = None, *, vs: Plan | str | None = None, exact: bool = False
    ) -> Explanations | Comparison:
        """Why a parameter, operator or module, or all that a glob matches, lies as it does: layout, cost by term, the
        runner-up with what switching costs, and which limits bind; or, with vs= another plan or the name of a known
        one ("ddp", "fsdp", "tp"), where the two part and what each difference costs. Both print themselves.

        exact: search for runners-up until they are proven, however long; else some seconds each, with what is proven
        till then. A plan from a file says layouts and nearest choices only. Raises ConfigurationError with the nearest
        names for a name that the plan does not have.
        """
        if (name is None) == (vs is None):
            raise ConfigurationError("explain takes a name, or vs= another plan: write one of the two")
        if vs is not None:
            return self._origin("explain(vs=...)").compare(self, vs)
        names = matching_names(self, str(name))
        if self.origin is None:
            return from_plan_alone(self, names)
        return self.origin.explain(self, names, exact)

    def memory(self, rank: int | None = None) -> MemoryTable:
        """The fullest moment of a step on one rank: by kind, by module and over time, in bytes. None: rank 0, or with
        stages the first rank of the tightest rank group, and what every stage keeps for micro-batches in flight."""
        return self._origin("memory()").memory(self, rank)

    def what_if(self, **changes: Any) -> Plan:
        """The best plan for the same model under other wishes: memory_limit=, dims=, mesh=, cluster=, constraints=,
        micro_batches=, ... as of `autopar.plan`; what is not named stays as it was asked."""
        return self._origin("what_if(...)").what_if(self, changes)

    def edit(self, changes: Mapping[str, Any]) -> Plan:
        """The plan with some placements changed by hand, completed, checked and priced again; everything else stays.

        changes: as `constraints=` of `autopar.plan`: {"lm_head.weight": "S(0)"}, {"head": {"tp": "R"}}; with stages
        also {"layers.3": {"pp": 1}} (to stage 1), {"schedule": "gpipe"}, {"micro_batches": 8}. Raises
        ConfigurationError naming tensor, axis and reason for what cannot be meant, PlanMismatchError for choices that
        cannot stand side by side, and InfeasibleError where the edited plan does not fit into memory.
        """
        return self._origin("edit(...)").edit(self, changes)

    def code(self, rank: int = 0) -> RankProgram:
        """The program of one rank as readable Python: each line with its module, layout and predicted seconds."""
        return self._origin("code()").code(self, rank)

    def _origin(self, question: str) -> Origin:
        if self.origin is None:
            raise ConfigurationError(
                f"{question} needs the model, and a plan from a file has none: "
                "autopar.Planner(model, inputs, cluster=...).bind(plan) gives it one; on the command line, give --model"
            )
        return self.origin

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, by a temporary file and a rename."""
        write_atomically(Path(path), self.to_json())

    def to_json(self) -> bytes:
        """The plan as indented JSON."""
        document = {"schema_version": SCHEMA_VERSION, **plain(self)}
        return msgspec.json.format(msgspec.json.encode(document), indent=1)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises ConfigurationError for a file that is missing, damaged or of another schema."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read the plan {path}: {error.strerror}") from error
        return Plan.from_json(content, str(path))

    @staticmethod
    def from_json(content: bytes, origin: str = "plan") -> Plan:
        """Inverse of `to_json`. Raises ConfigurationError naming what is damaged."""
        try:
            document = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{origin} is damaged: {error}; plan again or restore the file") from error
        fields = current(document, origin)
        try:
            plan: Plan = read(fields, Plan, "")
            _check_mesh(plan.mesh)
            if plan.pipeline is not None:
                check_pipeline(plan, plan.pipeline)
            check_entries(plan)
        except (TypeError, ValueError, KeyError, ConfigurationError) as error:
            raise ConfigurationError(f"{origin} is damaged: {error}") from error
        return plan

    def diff(self, other: Plan) -> str:
        """Unified diff of the choices of two plans, empty when they are equal."""
        return "\n".join(difflib.unified_diff(_choices(self), _choices(other), "this", "other", lineterm="", n=0))

    def with_(self, **changes: Any) -> Plan:
        """A copy with some fields replaced."""
        return replace(self, **changes)


def _check_mesh(mesh: Mesh) -> None:
    if not len(mesh.shape) == len(mesh.axis_names) == len(set(mesh.axis_names)) or min(mesh.shape, default=0) < 1:
        raise ValueError(f"mesh axes {list(mesh.axis_names)} of sizes {list(mesh.shape)}: one size >= 1 per axis name")


def check_pipeline(plan: Plan, pipeline: PipelinePlan) -> None:
    """Raise ConfigurationError where stages, mesh and schedule of a plan do not fit together."""
    groups, stages = [stage.rank_group for stage in pipeline.stages], pipeline.stages
    if plan.mesh.axis_names[0] != PIPELINE_AXIS or len(plan.mesh.shape) < 2:
        raise ConfigurationError(
            f"a plan with stages has a mesh of {PIPELINE_AXIS!r} and at least one more axis (of size 1 where a stage "
            f"runs on one device), not {list(plan.mesh.axis_names)}"
        )
    if sorted(set(groups)) != list(range(plan.mesh.shape[0])) or plan.mesh.shape[0] < 2:
        raise ConfigurationError(
            f"stages stand on rank groups {groups}; the mesh has {plan.mesh.shape[0]}: at least 2, and all in use"
        )
    cuts = [stage.last_operator for stage in stages]
    unknown = [cut for cut in cuts[:-1] if cut is None or cut not in plan.operators or cut.endswith("/bwd")]
    if unknown or cuts[-1] is not None or len(set(cuts)) != len(cuts):
        raise ConfigurationError(
            f"stages end at {cuts}: each but the last at another forward operator of the plan, the last at null"
        )
    if pipeline.groups:
        _check_groups(plan, pipeline.groups)
    pipeline.built(plan.micro_batches)


def _check_groups(plan: Plan, groups: tuple[RankGroup, ...]) -> None:
    """Raise ConfigurationError where unequal rank groups do not lie side by side, or not inside the plan's mesh."""
    shapes, num_axes = [group.shape for group in groups], len(plan.layout_mesh.shape)
    box = tuple(max(sizes) for sizes in zip(*shapes, strict=False))
    if any(len(shape) != num_axes or min(shape) < 1 for shape in shapes) or plan.mesh.shape != (len(groups), *box):
        raise ConfigurationError(
            f"rank groups of shapes {[list(shape) for shape in shapes]} on a mesh of {list(plan.mesh.shape)}: one "
            f"group per coordinate of {PIPELINE_AXIS!r}, one size per other axis, and the largest of them in the mesh"
        )
    end = 0
    for group in sorted(groups, key=lambda group: group.first_rank):
        if group.first_rank != end:
            raise ConfigurationError(
                f"rank groups begin at {[group.first_rank for group in groups]} with "
                f"{[group.size for group in groups]} ranks: each where another ends, the first at 0"
            )
        end += group.size


def _choices(plan: Plan) -> list[str]:
    """One line per choice, in plan order, for `diff`."""
    lines = [f"mesh {name}={size}" for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)]
    lines.append(f"micro_batches {plan.micro_batches}")
    if plan.pipeline is not None:
        lines.append(f"schedule {plan.pipeline.schedule}, {plan.pipeline.chunks} chunks {plan.pipeline.actions}")
        lines += [
            f"{stage.name} on {stage.rank_group} up to {stage.last_operator}{', gathers once' * stage.gather_once}"
            for stage in plan.pipeline.stages
        ]
        lines += [f"group {i}: {g}" for i, g in enumerate(plan.pipeline.groups)]
    for name, parameter in plan.parameters.items():
        kept = " kept" if parameter.keep_gathered else ""
        lines.append(f"{name}: stored {format_layout(parameter.stored)} used {format_layout(parameter.used)}{kept}")
    for name, operator in plan.operators.items():
        lines.append(f"{name}: {operator.axes} -> {[format_layout(layout) for layout in operator.outputs]}")
    return lines

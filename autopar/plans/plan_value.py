"""What was chosen, as values: parameters, operators, stages and what is known of them. `Plan` adds who answers for it.

A plan names operators `module.path/op#k` (`/bwd` in backward), so it outlives torch's node names, and embeds the
question that it answers. Layouts are written as one string per mesh axis: `["S(0)", "R"]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Layout, Mesh
from autopar.plans.logical_shards import Deterministic, num_shards
from autopar.schedules.actions import Schedule, parse_schedule
from autopar.schedules.check import check_schedule
from autopar.schedules.list_scheduler import TIMED_FAMILIES, build_schedule

AnyPlan = TypeVar("AnyPlan", bound="PlanValue")
DEFAULT_IMPLEMENTATION = "default"
"""The operator as it was captured."""
RING = "ring"
"""Attention whose blocks of keys and values go around the ranks."""
DEVICE, HOST = "device", "host"
"""Memories in which a value waits between its uses."""
WHOLE, MASK = "whole", "mask"
"""Forms in which a value is saved: as it is, as a bit a value."""
ROUNDED_BITS = {"8bit": 8, "4bit": 4, "2bit": 2}
"""The other forms -> bits a value, to which it is rounded by chance."""
PIPELINE_AXIS = "pp"
"""The first axis of the mesh of a plan with stages; layouts do not count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter: stored layout (`.grad` and optimizer state share it), layout in which operators find it,
    layout to which its gradient is reduced first, and whether the gathered weight is kept for backward (ZeRO-2-like)
    or gathered again (ZeRO-3). `shared_*`: the copy that all consumers of a phase share, as in `OperatorPlan`.
    `stored_on`: which memory it lies in between its uses, with `.grad` and optimizer state ("device", "host")."""

    stored: Layout
    used: Layout
    gradient: Layout
    keep_gathered: bool = False
    shared_forward: Layout | None = None
    shared_backward: Layout | None = None
    stored_on: str = DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlan:
    """One operator: the name that each mesh axis splits (None: replicated, "partial": operands pass as Partial), the
    layouts of its tensor operands and outputs. `shared_forward` and `shared_backward` (one entry per output, None: no
    shared copy) are the layouts to which an output is redistributed once, for all its consumers of that phase.
    `recompute`: its outputs are computed again in backward instead of being saved, where backward first wants them, and
    held up to its last reader; `recompute_at`: operators of backward in front of which they are given up, to be
    computed once more. `saved_on`: which memory they wait in for backward, where they are saved ("device", "host");
    `saved_as`: in which form ("whole", "mask", "8bit", "4bit", "2bit").
    `implementation`: the operator alternative by which it runs (`rules/alternatives.py`), "default" as it was captured.
    """

    axes: tuple[str | None, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    shared_forward: tuple[Layout | None, ...] = ()
    shared_backward: tuple[Layout | None, ...] = ()
    recompute: bool = False
    recompute_at: tuple[str, ...] = ()
    saved_on: str = DEVICE
    saved_as: str = WHOLE
    implementation: str = DEFAULT_IMPLEMENTATION


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
        """How many ranks it has."""
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


ONE_STAGE = PipelinePlan(
    schedule="1f1b", chunks=1, stages=(StagePlan(name="the whole model", last_operator=None, rank_group=0),)
)
"""No stages is one stage, which takes one micro-batch after the other forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of one step on one rank: seconds and peak bytes, with their parts. bytes_by_rung: of what
    backward reads of forward in one micro-batch, and of parameters on the host, by the rung of the memory ladder
    (`planner/memory/rungs.py`); empty where all is kept on the device."""

    step_seconds: float
    peak_bytes: float
    compute_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    bytes_by_kind: Mapping[str, float] = field(default_factory=dict)
    bytes_by_rung: Mapping[str, float] = field(default_factory=dict)


OUT_OF_TIME = "not priced: the time was over"
"""Error of a baseline that nothing speaks against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A baseline (DDP, ZeRO-3, Megatron) or the best of another mesh, priced by the same model; `error` says why it
    is impossible. A mesh that was dropped unsolved has only `bound_seconds`: nothing on it is cheaper."""

    name: str
    dims: Mapping[str, int]
    objective_seconds: float | None = None
    bound_seconds: float | None = None
    predicted: Prediction | None = None
    error: str | None = None

    @property
    def is_out_of_time(self) -> bool:
        """Whether it may run, and was not priced."""
        return self.error == OUT_OF_TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanValue:
    """All that was chosen. `inputs` and `buffers` hold the layouts of data; `prices_hash` identifies the cost
    tables to which objective, bound and gap belong; `kernel_backend` says who writes the kernels, and `kernels` which
    kinds of groups run as a kernel of ours instead (`plan_entries.KERNELS`); `statistics` counts strategies, nodes and
    replicated FLOPs. `bucket_bytes` says up to which size collectives of a kind ("all_reduce") are joined, 0 or absent:
    not at all; where it is None, each is also awaited where it starts, which takes the least memory. `product_chunks`
    says into how many chunks of rows products are cut beside the collectives of a kind that bring or take these rows,
    and under "all_to_all" in how many chunks of tokens layers of experts run whose rows travel (1: whole, rows return
    before gradients of weights are computed); absent: they stay whole. `symmetric_memory` names the groups ("tp") over
    which products run with their collective of a kind ("all_gather", "reduce_scatter") in memory that the ranks of a
    node share. `copy_ahead_bytes`: how many bytes may be under way between device and host in one direction, ahead of
    who reads them. `hidden_share` is the part of the communication of parameters that objective, bound and gap leave
    out, as it runs beside
    computation. With `micro_batches` m, operators, inputs and outputs are those of a m-th of the batch, and a step
    runs them m times; with `gather_once` parameters are gathered once per step, not once per micro-batch, and their
    gradients scattered once, held whole till then. With a `pipeline`, whose stages say the last of themselves, the
    first axis of the mesh is "pp" and every layout is one on the other
    axes (`layout_mesh`); with unequal rank groups the mesh is the smallest that holds the axes of each, and
    `num_ranks` counts devices. `replicated_experts`: module -> experts of which every rank has a copy,
    where rows travel to the others. `expert_order`: module -> its experts in the order in which they lie on the ranks,
    where that is not the model's: rows find them there, and parameters hold them so. `deterministic`: which bits are
    equal, as of `compile`. `discovered`: call -> rule that was found by execution, None: none holds."""

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
    symmetric_memory: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    copy_ahead_bytes: float = 0.0
    micro_batches: int = 1
    gather_once: bool = False
    replicated_experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    expert_order: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    deterministic: Deterministic = False
    hidden_share: float = 0.0
    pipeline: PipelinePlan | None = None
    prices_hash: str = ""
    question: Mapping[str, object] = field(default_factory=dict)
    baselines: tuple[Baseline, ...] = ()
    alternatives: tuple[Baseline, ...] = ()
    uncovered: Mapping[str, float] = field(default_factory=dict)
    discovered: Mapping[str, str | None] = field(default_factory=dict)
    statistics: Mapping[str, float | int | str] = field(default_factory=dict)
    explanations: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        """Into how many logical shards a batch is cut, for equal bits on any number of processes; 0: into none."""
        return num_shards(self.deterministic)

    @property
    def staged(self) -> PipelinePlan:
        """`pipeline`; where there is none, that of one stage."""
        return self.pipeline or ONE_STAGE

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """In the order of forward; one where there is no pipeline, which has at least two."""
        return self.staged.stages

    @property
    def in_stages(self) -> bool:
        """Whether there are several stages, each on a part of the ranks."""
        return self.pipeline is not None

    @property
    def in_one_part(self) -> bool:
        """Whether a step runs the program as it was captured: the whole batch at once, in one stage."""
        return self.micro_batches == 1 and not self.in_stages

    @property
    def layout_mesh(self) -> Mesh:
        """The axes that layouts speak of: those of the mesh, without "pp" where there are stages."""
        first = int(self.in_stages)
        return Mesh(self.mesh.axis_names[first:], self.mesh.shape[first:])

    @property
    def rank_groups(self) -> tuple[RankGroup, ...]:
        """The ranks at every coordinate of "pp"; one group where there are no stages."""
        if self.staged.groups:
            return self.staged.groups
        inner, count = self.layout_mesh, self.mesh.shape[0] if self.in_stages else 1
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

    @property
    def recomputed_at(self) -> Mapping[str, tuple[str, ...]]:
        """Operator that backward computes again more than once -> the operators of backward before which it does."""
        return {name: operator.recompute_at for name, operator in self.operators.items() if operator.recompute_at}

    @property
    def saved_on_host(self) -> frozenset[str]:
        """Names of the operators whose saved outputs wait in the memory of the host."""
        return frozenset(name for name, operator in self.operators.items() if operator.saved_on == HOST)

    @property
    def saved_smaller(self) -> Mapping[str, str]:
        """Operator -> the form in which its outputs are saved, where that is not as they are."""
        return {name: operator.saved_as for name, operator in self.operators.items() if operator.saved_as != WHOLE}

    @property
    def rounds(self) -> bool:
        """Whether anything that is saved is rounded by chance."""
        return any(form in ROUNDED_BITS for form in self.saved_smaller.values())

    @property
    def waits_on_host(self) -> bool:
        """Whether anything waits in the memory of the host."""
        return bool(self.saved_on_host) or any(each.stored_on == HOST for each in self.parameters.values())

    @property
    def implementations(self) -> frozenset[str]:
        """Names of the operator alternatives by which some operators run."""
        names = {operator.implementation for operator in self.operators.values()}
        return frozenset(names - {DEFAULT_IMPLEMENTATION})

    def on_group(self: AnyPlan, group: int) -> AnyPlan:
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
    def precision(self) -> str | None:
        """In which the plan's question says that the model computes; None: as the model is."""
        said = self.question.get("precision")
        return None if said is None else str(said)

    @property
    def is_in_bf16(self) -> bool:
        """Whether the graph is one in bf16; products may run in float8."""
        return self.precision in ("bf16", "fp8")

    @property
    def reduce_dtype(self) -> str | None:
        """In which the plan's question says that gradients are added over ranks; None: as they are computed."""
        said = self.question.get("reduce_dtype")
        return None if said is None else str(said)

    @property
    def expert_capacity(self) -> float | None:
        """How many times its even share of a rank's rows an expert takes, as the plan's question says; None: all."""
        said = self.question.get("expert_capacity")
        return said if isinstance(said, int | float) else None

    @property
    def expert_load(self) -> Mapping[str, tuple[float, ...]]:
        """Module -> the part of its rows that each of its experts gets, as the plan's question says; even where it says
        nothing."""
        said = self.question.get("expert_load")
        return {name: tuple(shares) for name, shares in said.items()} if isinstance(said, dict) else {}

    @property
    def input_shapes(self) -> dict[str, list[int]]:
        """Input -> its shape, of those that the plan's question tells."""
        said = self.question.get("inputs")
        return {name: shape for name, (shape, _) in said.items()} if isinstance(said, dict) else {}

    @property
    def placements(self) -> dict[str, Layout]:
        """Parameter name -> stored layout."""
        return {name: parameter.stored for name, parameter in self.parameters.items()}

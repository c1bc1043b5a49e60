"""The nearest uniform configuration of a plan: one degree per kind of parallelism, as other tools are told.

    mesh outer=4 inner=8, batch over outer, weights over inner    ->    dp_shard 4, tp 8, lost: 3 of 291 parameters ...

Each axis of the mesh counts as the kind of parallelism that most of the model's products make of it
(`plans/parallelism.py`). What lies otherwise than that says is lost, and listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Shard
from autopar.plans.capacity_factor import CAPPED
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import (
    PRODUCTS,
    ExpertWay,
    Role,
    Way,
    attention_ways,
    axis_roles,
    axis_vote,
    expert_way,
    expert_ways,
    forward_products,
    kind_of,
    split_on,
    zero_stage,
    zero_stage_of,
)
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION, ParameterPlan

Recomputation = Literal["none", "selective", "full"]
ContextWay = Literal["ring", "ulysses", "gather", "mixed"]

DEGREES: Mapping[str, str] = {
    "dp_replicate": "replicated data parallelism", "dp_shard": "sharded data parallelism",
    "cp": "context parallelism", "ep": "expert parallelism", "pp": "pipeline parallelism",
}  # fmt: skip
NORMS = ("native_layer_norm", "_fused_rms_norm", "rsqrt", "layer_norm", "rms_norm")
"""Operators whose split over the tensor-parallel axis tells that activations between blocks lie split (sequence
parallelism)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformPlan:
    """Degrees; their product is the number of devices (cp counts cp_inner). cp_way: how attention runs over the cp
    ranks, None where nobody says; cp_inner: of these, ranks beside each other that split heads in a ring of the others
    ("mixed"); cp_shards: parameters are stored split over them, too; ep_shards: those of no experts over the ep ranks,
    which see different samples; expert_capacity: how many times its even share of a rank's rows an
    expert takes, None: all. zero_stage: 0 where nothing is sharded, 2 where
    gathered weights are kept for backward, else 3. schedule, chunks: of the pipeline. batch: samples of a step, None
    where the plan does not say. stages: module -> stage, where a configuration says it. lost: sentences about what the
    plan does and this configuration does not."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    cp_way: ContextWay | None = None
    cp_inner: int = 1
    cp_shards: bool = False
    ep: int = 1
    ep_shards: bool = False
    expert_capacity: float | None = None
    pp: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    schedule: str | None = None
    chunks: int = 1
    micro_batches: int = 1
    batch: int | None = None
    sequence: int | None = None
    recompute: Recomputation = "none"
    precision: str = "fp32"
    stages: Mapping[str, int] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    @property
    def data_ranks(self) -> int:
        """Ranks that see different samples. Expert parallelism runs on ranks of data parallelism."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def num_devices(self) -> int:
        """Devices that it takes."""
        return self.data_ranks * self.tp * self.cp * self.pp

    @property
    def micro_batch(self) -> int | None:
        """Samples of one rank and micro-batch, at least one."""
        if self.batch is None:
            return None
        return max(1, self.batch // (self.micro_batches * self.data_ranks))

    @property
    def dims(self) -> dict[str, int]:
        """As `autopar.plan(dims=...)` takes them, to price the configuration."""
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
        sizes |= {"cp": self.cp // self.cp_inner, "cp_inner": self.cp_inner, "ep": self.ep, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def asked_way(self) -> Way | None:
        """As `autopar.plan(cp=...)` takes it."""
        return None if self.cp == 1 or self.cp_way == "mixed" else self.cp_way

    @property
    def asked_expert_way(self) -> ExpertWay | None:
        """As `autopar.plan(ep=...)` takes it: in all tools rows travel."""
        if self.ep == 1:
            return None
        return "dispatch" if self.expert_capacity is None else CAPPED


def nearest_uniform(plan: Plan) -> UniformPlan:
    """Degrees by role, and what they lose. Raises ConfigurationError for stages on unequal rank groups."""
    if plan.staged.groups:
        raise ConfigurationError(
            "stages on unequal rank groups have no uniform configuration; plan with dims={'pp': ...} to make them equal"
        )
    roles = axis_roles(plan)
    degrees: dict[str, int] = dict.fromkeys(get_args(Role), 1)
    for role, size in zip(roles, plan.layout_mesh.shape, strict=True):
        degrees[role] *= size
    shape = next((shape for shape in plan.input_shapes.values() if len(shape) > 1), None)
    recompute, recompute_lost = _recomputation(plan)
    way, inner, way_lost = _context(plan, roles)
    over_cp = [each for each in plan.parameters.values() if split_on(each, roles, "cp")]
    shards_over_cp = 2 * len(over_cp) > len(plan.parameters)
    over_ep = _stored_split_over_ep(plan, roles)
    return UniformPlan(
        **degrees,
        pp=len(plan.rank_groups),
        cp_way=way,
        cp_inner=inner,
        cp_shards=shards_over_cp,
        ep_shards=bool(over_ep),
        expert_capacity=plan.expert_capacity if degrees["ep"] > 1 else None,
        zero_stage=zero_stage(plan, roles) or (zero_stage_of(over_cp) if shards_over_cp else 0)
        or (zero_stage_of(over_ep) if over_ep else 0),
        sequence_parallel=_sequence_parallel(plan, roles),
        schedule=plan.staged.schedule if plan.in_stages else None,
        chunks=plan.staged.chunks,
        micro_batches=plan.micro_batches,
        batch=None if shape is None else shape[0],
        sequence=None if shape is None else shape[1],
        recompute=recompute,
        precision="bf16" if plan.is_in_bf16 else "fp32",
        stages={},
        lost=(
            *_lost_parameters(plan, roles),
            *_lost_operators(plan, roles),
            *_lost_expert_ways(plan, roles),
            *way_lost,
            *recompute_lost,
            *_lost_precision(plan),
        ),
    )


def _stored_split_over_ep(plan: Plan, roles: tuple[Role, ...]) -> list[ParameterPlan]:
    """The parameters that lie split over expert parallelism and are whole where they are used, as those of no experts
    are; none where fewer than half of such parameters do."""
    axes = [axis for axis, role in enumerate(roles) if role == "ep"]
    dense = [p for p in plan.parameters.values() if not any(isinstance(p.used[axis], Shard) for axis in axes)]
    found = [p for p in dense if split_on(p, roles, "ep")]
    return found if 2 * len(found) > len(dense) else []


def _lost_expert_ways(plan: Plan, roles: tuple[Role, ...]) -> Iterator[str]:
    """Products of experts whose rows do not travel over expert parallelism, as they do in all tools."""
    if expert_way(plan) == "two_level":
        yield "rows of experts travel once to every node and on inside of it; of that the configuration has no word"
    for axis, role in enumerate(roles):
        ways = expert_ways(plan, axis)
        others = ways.total() - ways["dispatch"] - ways[CAPPED]
        if role == "ep" and others:
            which = f"{others} of {ways.total()} products of experts"
            yield f"{which} send no rows over {_axis(plan, axis)}; in tools all do"


def cannot(uniform: UniformPlan, *degrees: str) -> list[str]:
    """What a configuration has no words for: sentences about those of `degrees` that are above one."""
    return [
        f"{DEGREES[name]} of {size}: not part of this configuration"
        for name in degrees
        if (size := getattr(uniform, name)) > 1
    ]


def _context(plan: Plan, roles: tuple[Role, ...]) -> tuple[ContextWay | None, int, list[str]]:
    """How attention runs over context parallelism, the ranks of an inner axis that split heads in a ring, and what one
    word for all of it loses."""
    axes = [axis for axis, (role, size) in enumerate(zip(roles, plan.layout_mesh.shape, strict=True))
            if role == "cp" and size > 1]  # fmt: skip
    ways = [attention_ways(plan, axis) for axis in axes]
    if not any(ways):
        return None, 1, []
    lost = [lost for axis in axes for lost in _plain_order(plan, axis)]
    found = {way for of_axis in ways for way in of_axis}
    if len(found) == 1 and None not in found:
        return next(way for way in found if way is not None), 1, lost
    if [set(of_axis) for of_axis in ways] == [{"ring"}, {"ulysses"}]:
        return "mixed", plan.layout_mesh.shape[axes[1]], lost
    counts = ", ".join(
        f"{way or 'neither of these'} in {count} over {_axis(plan, axis)}"
        for axis, of_axis in zip(axes, ways, strict=True)
        for way, count in of_axis.most_common()
    )
    return "mixed", 1, [f"attention does not run in one way over context parallelism: {counts}", *lost]


def _plain_order(plan: Plan, axis: int) -> Iterator[str]:
    """That a sequence lies in contiguous blocks, where other tools deal a causal one out from both ends."""
    queries = [chosen.inputs[0][axis] for kind, chosen in forward_products(plan)
               if kind == "attention" and chosen.axes[axis] == "s"]  # fmt: skip
    plain = sum(isinstance(placed, Shard) and not placed.zigzag for placed in queries)
    if plain:
        yield (
            f"{plain} of {len(queries)} attentions read contiguous blocks of the sequence over {_axis(plan, axis)}; "
            "where they are causal, torch and Megatron-LM deal blocks out from both ends (load balancing)"
        )


def _sequence_parallel(plan: Plan, roles: tuple[Role, ...]) -> bool:
    axes = [axis for axis, role in enumerate(roles) if role == "tp"]
    norms = [chosen for name, chosen in plan.operators.items() if kind_of(name) in NORMS and not name.endswith("/bwd")]
    split = [any(isinstance(chosen.outputs[0][axis], Shard) for axis in axes) for chosen in norms]
    return sum(split) * 2 > len(split)


def _recomputation(plan: Plan) -> tuple[Recomputation, list[str]]:
    """Full where most products are computed again, selective where only others are."""
    products = [chosen.recompute for _, chosen in forward_products(plan)]
    others = sum(chosen.recompute for chosen in plan.operators.values()) - sum(products)
    share = sum(products) / len(products) if products else 0.0
    if share > 0.5:
        kind: Recomputation = "full"
    else:
        kind = "selective" if others or share else "none"
    lost = [] if share in (0.0, 1.0) else [f"{share:.0%} of the products are computed again, not all or none"]
    return kind, lost


def _lost_parameters(plan: Plan, roles: tuple[Role, ...]) -> Iterator[str]:
    """Parameters that are not sharded although data parallelism shards, or the other way round."""
    for axis, role in enumerate(roles):
        wanted = {"dp_shard": True, "dp_replicate": False}.get(role)
        if wanted is None or plan.layout_mesh.shape[axis] == 1:
            continue
        others = [name for name, p in plan.parameters.items() if isinstance(p.stored[axis], Shard) != wanted]
        if others:
            does = "stay whole" if wanted else "are stored split"
            yield _counted(len(others), len(plan.parameters), f"parameters {does} over {_axis(plan, axis)}", others[0])


def _lost_precision(plan: Plan) -> Iterator[str]:
    """Words that configurations here have for bf16 alone."""
    if plan.precision == "fp16":
        yield "products in fp16: set them, and the scaling of the loss, in the configuration"
    if plan.implementations:
        count = sum(chosen.implementation != DEFAULT_IMPLEMENTATION for chosen in plan.operators.values())
        yield f"{count} operators run as {', '.join(sorted(plan.implementations))}: switch float8 on in the model"
    if plan.reduce_dtype is not None:
        yield f"gradients are added over ranks in {plan.reduce_dtype}: set it in the configuration"


def _lost_operators(plan: Plan, roles: tuple[Role, ...]) -> Iterator[str]:
    """Products that split something else than the role of the axis says."""
    total = sum(1 for _ in forward_products(plan))
    for axis, role in enumerate(roles):
        if plan.layout_mesh.shape[axis] == 1:
            continue
        wanted = "batch" if role.startswith("dp") or role == "ep" else role
        others = [
            name
            for name, chosen in plan.operators.items()
            if not name.endswith("/bwd")
            and kind_of(name) in PRODUCTS
            and axis_vote(kind_of(name), chosen.axes[axis]) != wanted
            and not (role == "ep" and kind_of(name) == "expert_linear")  # `_lost_expert_ways` tells
        ]
        if others and role != "cp":  # the rows of a product may hold the sequence as well as the batch
            yield _counted(len(others), total, f"products do not split {wanted} over {_axis(plan, axis)}", others[0])


def _axis(plan: Plan, axis: int) -> str:
    return f"{plan.layout_mesh.axis_names[axis]}={plan.layout_mesh.shape[axis]}"


def _counted(count: int, total: int, what: str, example: str) -> str:
    return f"{count} of {total} {what} (as {example})"

"""Parallelism: what the axes of a plan's mesh do, in the field's words.

    parallelism(plan)      "ZeRO-3 over 64 devices", "4 stages (1f1b) of TP 8 x DDP 2 over 64 devices",
                           "DDP (ZeRO-3 for 98 of 291 parameters) over 64 devices",
                           "DDP 2 x ring attention 4 over 8 devices"

Each axis of the mesh gets the role that most of the model's products give it. A product votes with the name that it
splits over the axis (`OperatorPlan.axes`): its rows with an attention split by samples are data parallelism, with one
split by queries, or by heads where the rows of other products are split, context parallelism, its columns or its
contracted dim tensor parallelism. Where most products of experts split the experts, the axis is expert parallelism,
though all other products split the batch over it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast, get_args

from autopar.layouts.placement import Shard
from autopar.plans.capacity_factor import CAPPED
from autopar.plans.expert_hops import INNER_EXPERT_AXIS, hops_of
from autopar.plans.plan_value import RING, OperatorPlan, ParameterPlan, PlanValue

Role = Literal["dp_replicate", "dp_shard", "tp", "cp", "ep"]
Way = Literal["ring", "ulysses", "gather"]
"""How attention runs over an axis of context parallelism, in the words of `cp=`."""
ExpertWay = Literal["dispatch", "two_level", "gather", "masked", "capacity"]
"""How products of experts run over an axis of expert parallelism, in the words of `ep=`."""

VOTES: Mapping[tuple[str, str], Role] = {
    ("attention", "h"): "tp", ("attention", "g"): "tp", ("attention", "s"): "cp",
    ("mm", "n"): "tp", ("mm", "k"): "tp", ("expert_linear", "e"): "ep", ("expert_linear", "t+e"): "ep",
    ("expert_linear", "k"): "tp",
    ("expert_linear", "n"): "tp", ("_grouped_mm", "e"): "ep", ("_grouped_mm", "k"): "tp", ("_grouped_mm", "n"): "tp",
    ("tiled_mlp", "f"): "tp", ("convolution", "co"): "tp", ("convolution", "ci"): "tp",
}  # fmt: skip
"""(operator, name that the axis splits) -> role; every other split of a product's rows is of the batch."""
EXPERT_SPLITS: Mapping[str, ExpertWay] = {"t+e": "dispatch", "t": "gather", "e": "masked"}
"""What a product of experts splits over an axis -> in which lossless way it runs."""
PRODUCTS = ("mm", "bmm", "attention", "convolution", "_grouped_mm", "expert_linear", "tiled_mlp")
SHORT_NAMES: Mapping[Role, str] = {"tp": "TP", "ep": "expert parallelism"}
"""Roles whose name depends on nothing; that of data parallelism depends on what is sharded, that of context parallelism
on how attention runs."""
CONTEXT = "context parallelism"
WAY_NAMES: Mapping[Way | None, str] = {
    "ring": "ring attention",
    "ulysses": "Ulysses",
    "gather": f"{CONTEXT} (keys and values gathered)",
    None: f"{CONTEXT} (attention whole)",
}
SAME_WORK = "same work"
"""Of an axis that splits nothing."""


def parallelism(plan: PlanValue) -> str:
    """What the plan is, in the words of the field, over how many devices."""
    if plan.num_ranks == 1:
        return "one device"
    over = f"over {plan.num_ranks} devices"
    groups = plan.staged.groups
    if groups:
        sizes = " + ".join(str(group.size) for group in groups)
        return f"{len(plan.stages)} stages ({plan.staged.schedule}) on groups of {sizes} devices"
    kinds = _kinds(plan)
    if [kind for kind, _ in kinds] == [SAME_WORK] and not plan.in_stages:
        return f"the same work on each of {plan.num_ranks} devices"
    inside = kinds[0][0] if len(kinds) == 1 and not plan.in_stages else " x ".join(_sized(*kind) for kind in kinds)
    if not plan.in_stages:
        return f"{inside} {over}"
    stages = f"{len(plan.stages)} stages ({plan.staged.schedule})"
    return f"{stages} of {inside} {over}" if inside else f"{stages} {over}"


def _kinds(plan: PlanValue) -> list[tuple[str, int]]:
    """(kind of parallelism, degree), outermost first, of those of more than one device."""
    roles = axis_roles(plan)
    degrees: Counter[Role] = Counter()
    idle = 1
    context: Counter[str] = Counter()
    for axis, (role, size) in enumerate(zip(roles, plan.layout_mesh.shape, strict=True)):
        if _splits_nothing(plan, axis):
            idle *= size
        elif role == "cp" and size > 1:
            name = _context(plan, axis)
            context[name] = max(context[name], 1) * size
        else:
            degrees[role] = max(degrees[role], 1) * size
    replicas, shards = degrees["dp_replicate"] or 1, degrees["dp_shard"] or 1
    sharded = f"ZeRO-{zero_stage(plan, roles) or 1}"
    data = _replicated(plan, roles) if shards == 1 else sharded if replicas == 1 else f"HSDP ({sharded})"
    experts = f"two-level {SHORT_NAMES['ep']}" if expert_way(plan) == "two_level" else SHORT_NAMES["ep"]
    others = [*context.items(), (SHORT_NAMES["tp"], degrees["tp"] or 1), (experts, degrees["ep"] or 1)]
    return [(kind, size) for kind, size in ((data, replicas * shards), *others, (SAME_WORK, idle)) if size > 1]


def _sized(kind: str, size: int) -> str:
    """ "TP 8"; "DDP 4 (ZeRO-3 for 98 of 291 parameters)"."""
    name = next((name for name in ("DDP", CONTEXT) if kind.startswith(f"{name} (")), kind)
    return kind.replace(name, f"{name} {size}", 1)


def _context(plan: PlanValue, axis: int) -> str:
    """ "ring attention"; "context parallelism (ring attention in 10, Ulysses in 2 of 12)" where the ways differ."""
    ways = attention_ways(plan, axis)
    if len(ways) < 2:
        return WAY_NAMES[next(iter(ways))] if ways else CONTEXT
    counts = ", ".join(f"{_short(way)} in {count}" for way, count in ways.most_common())
    return f"{CONTEXT} ({counts} of {ways.total()})"


def _short(way: Way | None) -> str:
    """ "ring attention"; "keys and values gathered"."""
    return WAY_NAMES[way].removeprefix(f"{CONTEXT} (").removesuffix(")")


def attention_ways(plan: PlanValue, axis: int) -> Counter[Way | None]:
    """By how many attentions of forward take which way over an axis; None: those that it splits neither by queries nor
    by heads."""
    chosen = (operator for kind, operator in forward_products(plan) if kind == "attention")
    return Counter(_way(operator, axis) for operator in chosen)


def _way(attention: OperatorPlan, axis: int) -> Way | None:
    if attention.axes[axis] == "s":
        return "ring" if attention.implementation == RING else "gather"
    return "ulysses" if attention.axes[axis] in ("h", "g") else None


def _replicated(plan: PlanValue, roles: tuple[Role, ...]) -> str:
    """ "DDP"; with how many parameters are sharded all the same, where that is fewer than half of them."""
    sharded = [each for each in plan.parameters.values() if split_on(each, roles, "dp_replicate")]
    if not sharded:
        return "DDP"
    return f"DDP (ZeRO-{zero_stage_of(sharded)} for {len(sharded)} of {len(plan.parameters)} parameters)"


def _splits_nothing(plan: PlanValue, axis: int) -> bool:
    """Whether every device along an axis does the same work with the same parameters."""
    works = any(operator.axes[axis] is not None for operator in plan.operators.values())
    return not works and not any(isinstance(each.stored[axis], Shard) for each in plan.parameters.values())


def axis_roles(plan: PlanValue) -> tuple[Role, ...]:
    """The role of every axis of the layouts' mesh: by its name where it is one, else by what products split over it."""
    return tuple(_role(plan, axis, name) for axis, name in enumerate(plan.layout_mesh.axis_names))


def _role(plan: PlanValue, axis: int, name: str) -> Role:
    if name in get_args(Role) and name != "ep":
        return cast(Role, name)
    if name == "cp_inner":
        return "cp"
    cast_votes = (axis_vote(operator, chosen.axes[axis]) for operator, chosen in forward_products(plan))
    votes = Counter(vote for vote in cast_votes if vote)
    winner = votes.most_common(1)[0][0] if votes else "batch"
    if winner != "batch":
        return winner
    if _splits_experts(plan, axis):
        return "ep"
    attention = [chosen.axes[axis] for kind, chosen in forward_products(plan) if kind == "attention"]
    sequence = Counter(axis_vote("attention", split) for split in attention)
    if sequence["cp"] + sequence["tp"] > sequence["batch"]:  # heads, though no weight is split by columns: Ulysses
        return "cp"
    stored = [isinstance(parameter.stored[axis], Shard) for parameter in plan.parameters.values()]
    return "dp_shard" if sum(stored) * 2 >= len(stored) > 0 else "dp_replicate"


def _splits_experts(plan: PlanValue, axis: int) -> bool:
    """Whether most products of experts split the experts over an axis."""
    ways = expert_ways(plan, axis)
    return 2 * (ways["dispatch"] + ways[CAPPED] + ways["masked"]) > ways.total()


def expert_ways(plan: PlanValue, axis: int) -> Counter[ExpertWay | None]:
    """By how many products of experts of forward run in which way over an axis; None: those that split neither rows nor
    experts."""
    chosen = (operator.axes[axis] for kind, operator in forward_products(plan) if kind == "expert_linear")
    ways = EXPERT_SPLITS if plan.expert_capacity is None else {**EXPERT_SPLITS, "t+e": CAPPED}
    return Counter(ways.get(split or "") for split in chosen)


def expert_way(plan: PlanValue) -> ExpertWay | None:
    """The way in which products of experts run over the axis `ep` wherever they can, which else gather; None where a
    plan has no such axis, or no experts."""
    names = plan.layout_mesh.axis_names
    found = expert_ways(plan, names.index("ep")) if "ep" in names else Counter()
    ways: tuple[ExpertWay, ...] = ("dispatch", CAPPED, "masked", "gather")
    way = next((way for way in ways if found[way]), None)
    inner = expert_ways(plan, names.index(INNER_EXPERT_AXIS)) if INNER_EXPERT_AXIS in names else Counter()
    return "two_level" if way == "dispatch" and inner["dispatch"] else way


def expert_ranks(plan: PlanValue, module: str) -> tuple[int, ...]:
    """Of every hop of the rows of a module, over how many ranks they travel to their experts; none where they do not,
    or where stages stand on unequal rank groups."""
    names, sizes = plan.layout_mesh.axis_names, plan.layout_mesh.shape
    products = (e for n, e in plan.operators.items() if n.startswith(f"{module}/expert_linear#"))
    splits = ([EXPERT_SPLITS.get(split or "") for split in each.axes] for each in products)
    axes = {tuple(axis for axis, way in enumerate(each) if way == "dispatch") for each in splits}
    if len(axes) != 1 or plan.staged.groups:
        return ()
    (found,) = axes
    hops = hops_of(found, [names[axis] for axis in found]) if found else []
    return tuple(math.prod(sizes[axis] for axis in hop) for hop in hops)


def rows_travel(plan: PlanValue) -> bool:
    """Whether rows of some product travel to the rank of their expert."""
    products = (chosen for kind, chosen in forward_products(plan) if kind == "expert_linear")
    return any(EXPERT_SPLITS.get(split or "") == "dispatch" for chosen in products for split in chosen.axes)


def asked_expert_way(plan: PlanValue) -> ExpertWay | None:
    """As `autopar.plan(ep=...)` takes it, to plan again for what a plan does: a capacity that cannot run is kept."""
    return expert_way(plan) if plan.expert_capacity is None else CAPPED


def axis_vote(operator: str, split: str | None) -> Role | Literal["batch"] | None:
    """What an operator that splits this name over an axis makes of the axis; None where it splits nothing."""
    if split is None or split == "partial":
        return None
    return VOTES.get((operator, split), "batch")


def forward_products(plan: PlanValue) -> Iterator[tuple[str, OperatorPlan]]:
    """(bare name, choice) of the products of forward."""
    for name, chosen in plan.operators.items():
        if not name.endswith("/bwd"):
            kind = kind_of(name)
            if kind in PRODUCTS:
                yield kind, chosen


def kind_of(operator: str) -> str:
    """The bare ATen name in `module.path/op#k`."""
    return operator.rpartition("/")[2].partition("#")[0]


def zero_stage(plan: PlanValue, roles: tuple[Role, ...]) -> int:
    """0 where no parameter is sharded over data parallelism, 2 where most are kept gathered for backward, else 3."""
    sharded = [p for p in plan.parameters.values() if split_on(p, roles, "dp_shard")]
    return zero_stage_of(sharded) if sharded else 0


def zero_stage_of(sharded: Sequence[ParameterPlan]) -> Literal[2, 3]:
    """2 where most of these sharded parameters are kept gathered for backward, else 3."""
    return 2 if sum(parameter.keep_gathered for parameter in sharded) * 2 > len(sharded) else 3


def split_on(parameter: ParameterPlan, roles: tuple[Role, ...], role: Role) -> bool:
    """Whether a parameter is stored split over an axis of this role."""
    return any(
        isinstance(placement, Shard) for placement, own in zip(parameter.stored, roles, strict=True) if own == role
    )

"""Do the entries of a plan make sense by themselves? Checked when a file is read, so a slip of the hand fails there.

    "up.weight": {"stored": ["R"], ...} on a mesh of dp and tp
        -> parameters.up.weight.stored has 1 placement; the layouts' mesh has 2 axes (dp, tp): write one for each

Only what the file says is needed, no model. Shapes and rules, which the file does not hold, are compared with the graph
when the plan is lowered (`passes/lowering/check_plan.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Layout, Mesh, Partial, Replicate, Shard, format_layout
from autopar.nearest_name import did_you_mean
from autopar.plans.capacity_factor import check_expert_capacity
from autopar.plans.logical_shards import is_power_of_two
from autopar.plans.plan_value import (
    DEFAULT_IMPLEMENTATION,
    DEVICE,
    HOST,
    MASK,
    PIPELINE_AXIS,
    RING,
    ROUNDED_BITS,
    WHOLE,
    OperatorPlan,
    ParameterPlan,
    PipelinePlan,
    PlanValue,
    RankGroup,
)

COLLECTIVES = frozenset({"all_gather", "all_reduce", "reduce_scatter"})
"""Kinds that `bucket_bytes` and `product_chunks` speak of."""
EXCHANGES = "all_to_all"
"""A kind that `product_chunks` speaks of, too: of rows that travel to their expert."""
IN_SYMMETRIC_MEMORY = COLLECTIVES - {"all_reduce"}
"""Kinds that `symmetric_memory` speaks of."""
KERNELS = ("rms_norm", "layer_norm", "gated", "gelu", "rope", "cross_entropy", "linear_cross_entropy", "tiled_mlp")
"""Kinds of kernels of ours that a plan may name (`passes/kernels/use_kernels.py`)."""
FOR_MEMORY = ("linear_cross_entropy", "tiled_mlp")
"""Kinds that compute products twice for less memory: none where memory suffices."""
IMPLEMENTATIONS = (DEFAULT_IMPLEMENTATION, "fp8_rowwise", "fp8_tensorwise", RING)
"""Names of the ways in which operators run (`rules/alternatives.py`)."""
MEMORIES = (DEVICE, HOST)
"""Where parameters are stored, and saved values wait."""
FORMS = (WHOLE, MASK, *ROUNDED_BITS)
"""In which values are saved."""
PARTIAL_SUMS = "partial"
"""What an axis of an operator says that adds nothing up and hands partial sums on."""


MOST_MICRO_BATCHES = 1 << 14
"""Each is several actions per stage in the schedule, which is made when a plan is read."""


def check_plan(plan: PlanValue) -> None:
    """Raises ConfigurationError with the entry, the axis and the reason, for the first entry that cannot be meant."""
    _check_mesh(plan.mesh)
    if not 1 <= plan.micro_batches <= MOST_MICRO_BATCHES:
        raise ConfigurationError(
            f"micro_batches is {plan.micro_batches}; a step runs the batch in at least 1 part, and in at most "
            f"{MOST_MICRO_BATCHES:,}"
        )
    if plan.gather_once and (plan.in_stages or plan.shards):
        raise ConfigurationError(
            "gather_once is for micro-batches without stages, each of which says it of itself (pipeline.stages), and "
            "without logical shards (deterministic), which are summed one by one"
        )
    if plan.pipeline is not None:
        check_pipeline(plan, plan.pipeline)
    _check_shards(plan)
    check_expert_capacity(plan.question.get("ep"), plan.question.get("expert_capacity"))
    problem = next(_all_problems(plan), None)
    if problem is not None:
        raise ConfigurationError(problem)


def _check_shards(plan: PlanValue) -> None:
    shards = plan.shards
    if not shards:
        return
    if not is_power_of_two(shards) or plan.in_stages or sum(size > 1 for size in plan.mesh.shape) > 1:
        raise ConfigurationError(
            f"deterministic is {shards}: 2, 4, 8, ... logical shards, in a plan without stages on one axis of devices"
        )
    if plan.num_ranks * plan.micro_batches != shards:
        raise ConfigurationError(
            f"deterministic is {shards}: {plan.num_ranks} devices compute {plan.micro_batches} micro-batches each, and "
            "each of these is a logical shard; edit one of them"
        )


def _check_mesh(mesh: Mesh) -> None:
    if not len(mesh.shape) == len(mesh.axis_names) == len(set(mesh.axis_names)) or min(mesh.shape, default=0) < 1:
        raise ValueError(f"mesh axes {list(mesh.axis_names)} of sizes {list(mesh.shape)}: one size >= 1 per axis name")


def check_pipeline(plan: PlanValue, pipeline: PipelinePlan) -> None:
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


def _check_groups(plan: PlanValue, groups: tuple[RankGroup, ...]) -> None:
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


def _all_problems(plan: PlanValue) -> Iterator[str]:
    yield from _negative_amounts(plan)
    yield from _replicas_of_capped(plan)
    yield from _orders(plan)
    yield from _problems(plan, plan.layout_mesh, "")
    yield from _input_dims(plan)
    yield from _collective_problems(plan)
    yield from _symmetric_problems(plan)
    yield from _kernel_problems(plan)
    yield from _repeated_problems(plan)
    for index, group in enumerate(plan.staged.groups):
        mesh = Mesh(plan.layout_mesh.axis_names, group.shape)
        yield from _problems(group, mesh, f"pipeline.groups[{index}].")


def _repeated_problems(plan: PlanValue) -> Iterator[str]:
    """What is computed again several times that is saved, or before operators that backward does not have."""
    for name, moments in plan.recomputed_at.items():
        if not plan.operators[name].recompute:
            yield f"operators.{name}.recompute_at names operators, but recompute is false: what is saved stays"
        for moment in moments:
            if moment not in plan.operators or not moment.endswith("/bwd"):
                near = did_you_mean(moment, [other for other in plan.operators if other.endswith("/bwd")])
                yield f"operators.{name}.recompute_at: {moment!r} is no operator of backward of the plan{near}"


def _replicas_of_capped(plan: PlanValue) -> Iterator[str]:
    """Rows of replicated experts stay, whoever has a place: one of the two."""
    if plan.expert_capacity is not None and plan.replicated_experts:
        yield f"replicated_experts with expert_capacity {plan.expert_capacity}: take one of them out of the plan"


def _orders(plan: PlanValue) -> Iterator[str]:
    """Every expert lies somewhere, once."""
    for module, order in plan.expert_order.items():
        if sorted(order) != list(range(len(order))):
            yield f"expert_order.{module} is {list(order)}: write every expert once, those of the first rank first"


def _negative_amounts(plan: PlanValue) -> Iterator[str]:
    amounts = {f"predicted.{each.name}": getattr(plan.predicted, each.name) for each in fields(plan.predicted)}
    amounts |= {f"predicted.bytes_by_kind.{kind}": size for kind, size in plan.predicted.bytes_by_kind.items()}
    amounts |= {f"predicted.bytes_by_rung.{rung}": size for rung, size in plan.predicted.bytes_by_rung.items()}
    for entry, amount in {"objective_seconds": plan.objective_seconds, **amounts}.items():
        if isinstance(amount, int | float) and amount < 0:
            yield f"{entry} is {amount}; seconds and bytes are never negative"


def _problems(entries: PlanValue | RankGroup, mesh: Mesh, where: str) -> Iterator[str]:
    """What is wrong with the entries of a plan, or of one of its rank groups."""
    for name, parameter in entries.parameters.items():
        yield from _parameter_problems(f"{where}parameters.{name}", parameter, mesh)
    for name, operator in entries.operators.items():
        yield from _operator_problems(f"{where}operators.{name}", name, operator, mesh)
    for kind, layouts in (("inputs", entries.inputs), ("buffers", entries.buffers), ("outputs", entries.outputs)):
        for name, layout in layouts.items():
            yield from _axes_missing(f"{where}{kind}.{name}", layout, mesh)
            if kind != "outputs":
                yield from _partial(f"{where}{kind}.{name}", layout, mesh, "data comes in whole or split")


def _parameter_problems(where: str, parameter: ParameterPlan, mesh: Mesh) -> Iterator[str]:
    layouts = {"stored": parameter.stored, "used": parameter.used, "gradient": parameter.gradient}
    shared = {"shared_forward": parameter.shared_forward, "shared_backward": parameter.shared_backward}
    layouts |= {field: layout for field, layout in shared.items() if layout is not None}
    for field, layout in layouts.items():
        yield from _axes_missing(f"{where}.{field}", layout, mesh)
        if field != "gradient":
            yield from _partial(f"{where}.{field}", layout, mesh, "only its gradient can be one")
    yield from _unknown_memory(f"{where}.stored_on", parameter.stored_on)


def _unknown_memory(where: str, memory: str) -> Iterator[str]:
    if memory not in MEMORIES:
        yield f"{where} is {memory!r}; there are {', '.join(MEMORIES)}{did_you_mean(memory, MEMORIES)}"


def _operator_problems(where: str, name: str, operator: OperatorPlan, mesh: Mesh) -> Iterator[str]:
    if len(operator.axes) != len(mesh.shape):
        yield f"{where}.axes has {_counted(len(operator.axes), mesh, 'entry', 'entries')}"
    for field, layouts in (("inputs", operator.inputs), ("outputs", operator.outputs)):
        for index, layout in enumerate(layouts):
            yield from _axes_missing(f"{where}.{field}[{index}]", layout, mesh)
    for field, copies in (("shared_forward", operator.shared_forward), ("shared_backward", operator.shared_backward)):
        if copies and len(copies) != len(operator.outputs):
            yield f"{where}.{field} has {len(copies)} entries; the operator has {len(operator.outputs)} outputs"
        for index, copy in enumerate(copies):
            yield from _axes_missing(f"{where}.{field}[{index}]", copy or operator.outputs[index], mesh)
    if operator.recompute and name.endswith("/bwd"):
        yield f"{where}.recompute is true; only operators of forward can be computed again in backward"
    yield from _unknown_memory(f"{where}.saved_on", operator.saved_on)
    if operator.saved_on != DEVICE and (operator.recompute or name.endswith("/bwd")):
        yield (
            f"{where}.saved_on is {operator.saved_on!r}; only what forward saves, and backward does not compute again, "
            "waits there"
        )
    if operator.saved_as not in FORMS:
        yield f"{where}.saved_as is {operator.saved_as!r}; there are {', '.join(FORMS)}" + did_you_mean(
            operator.saved_as, FORMS
        )
    if operator.saved_as != WHOLE and (operator.recompute or name.endswith("/bwd")):
        yield (
            f"{where}.saved_as is {operator.saved_as!r}; only what forward saves, and backward does not compute again, "
            "has a form"
        )
    if operator.implementation not in IMPLEMENTATIONS:
        near = did_you_mean(operator.implementation, IMPLEMENTATIONS)
        yield f"{where}.implementation is {operator.implementation!r}; there are {', '.join(IMPLEMENTATIONS)}{near}"
    for axis, choice in enumerate(operator.axes):
        yield from _choice_problems(where, operator, mesh, axis, choice)


def _choice_problems(where: str, operator: OperatorPlan, mesh: Mesh, axis: int, choice: str | None) -> Iterator[str]:
    """Whether the layouts do what the operator says of one axis. An axis of size 1 splits nothing."""
    if mesh.shape[axis] == 1:
        return
    before = [layout[axis] for layout in operator.inputs]
    after = [layout[axis] for layout in operator.outputs]
    if choice is None:
        fits = all(isinstance(placement, Replicate) for placement in (*before, *after))
        wrong = "axes says null, so the operator runs whole there"
    elif choice == PARTIAL_SUMS:
        fits = all(isinstance(placement, Partial) for placement in after)
        wrong = "axes says that partial sums pass through"
    else:
        fits = any(isinstance(placement, Shard) for placement in (*before, *after))
        wrong = f"axes says that it splits {choice!r}"
    if not fits:
        lie = f"its inputs are {format_layout(tuple(before))} and its outputs {format_layout(tuple(after))} there"
        yield f"{where} on axis {mesh.axis_names[axis]!r}: {wrong}, but {lie}; edit one of them"


def _kernel_problems(plan: PlanValue) -> Iterator[str]:
    """Kernels of ours that do not exist."""
    for kind in plan.kernels:
        if kind not in KERNELS:
            yield f"kernels: {kind!r} is none of ours; write some of {', '.join(KERNELS)}"


def _collective_problems(plan: PlanValue) -> Iterator[str]:
    """What is wrong with sizes of buckets and numbers of chunks, per kind of collective."""
    least = {
        "bucket_bytes": (plan.bucket_bytes or {}, 0, COLLECTIVES),
        "product_chunks": (plan.product_chunks, 1, COLLECTIVES | {EXCHANGES}),
    }
    for field, (given, smallest, kinds) in least.items():
        for kind, value in given.items():
            if kind not in kinds:
                yield f"{field}.{kind}: there is no such collective; write one of {', '.join(sorted(kinds))}"
            elif value < smallest:
                yield f"{field}.{kind} is {value}; write {smallest} or more"


def _symmetric_problems(plan: PlanValue) -> Iterator[str]:
    """Kinds that symmetric memory does not have, and groups that are no axes of the mesh."""
    axes = plan.layout_mesh.axis_names
    for kind, groups in plan.symmetric_memory.items():
        if kind not in IN_SYMMETRIC_MEMORY:
            yield f"symmetric_memory.{kind}: write one of {', '.join(sorted(IN_SYMMETRIC_MEMORY))}"
        for group in groups:
            if group.split("+") != [axis for axis in axes if axis in group.split("+")]:
                yield (
                    f"symmetric_memory.{kind} names the group {group!r}; the mesh has the axes {', '.join(axes)}: "
                    'write one of them, or several in this order, joined by "+"'
                )


def _axes_missing(where: str, layout: Layout, mesh: Mesh) -> Iterator[str]:
    if len(layout) != len(mesh.shape):
        yield f"{where} has {_counted(len(layout), mesh, 'placement', 'placements')}"


def _counted(count: int, mesh: Mesh, one: str, many: str) -> str:
    axes = f"{len(mesh.shape)} {'axis' if len(mesh.shape) == 1 else 'axes'} ({', '.join(mesh.axis_names)})"
    return f"{count} {one if count == 1 else many}; the layouts' mesh has {axes}: write one for each"


def _partial(where: str, layout: Layout, mesh: Mesh, why: str) -> Iterator[str]:
    for axis, placement in enumerate(layout):
        if isinstance(placement, Partial):
            yield f"{where} on axis {mesh.axis_names[axis]!r} is {placement}, a sum that is not complete: {why}"


def _input_dims(plan: PlanValue) -> Iterator[str]:
    """Inputs that are split along a dim which they do not have; the question holds their shapes."""
    shapes = plan.input_shapes
    for name, layout in plan.inputs.items():
        if name not in shapes:
            continue
        shape = shapes[name]
        for axis, placement in enumerate(layout):
            if isinstance(placement, Shard) and placement.dim >= len(shape):
                axis_name = plan.layout_mesh.axis_names[axis]
                yield f"inputs.{name} on axis {axis_name!r} is {placement}; its shape {shape} has {len(shape)} dims"

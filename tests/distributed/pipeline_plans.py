"""Plans with stages for the tests: an intra-operator plan of one stage's mesh, and cuts behind blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.capture import Captures, fingerprint
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.passes.stages.stage_plans import with_pipeline
from autopar.planner.batch.micro_batch_program import in_parts
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import PIPELINE_AXIS, RankGroup
from autopar.program import MicroProgram
from autopar.questions import capture_model
from autopar.request import Request
from autopar.verification import one_device_plan
from tests.distributed.pipeline_models import CASES


@functools.lru_cache
def micro_program(name: str, micro_batches: int) -> MicroProgram:
    """The step of a case in micro-batches."""
    model, batch = CASES[name].model(), CASES[name].batch(0)
    request = Request(cluster=Cluster.parse("1x1 H100-SXM"), **CASES[name].options)
    captured = capture_model(model, (), batch, request, Captures())
    return in_parts(captured.program, micro_batches, captured)


def block_ends(micro: MicroProgram, blocks: Sequence[str]) -> list[str]:
    """The last forward operator of each of these modules, in program order."""
    found = {}
    for node in micro.program.graph.nodes:
        if node.op == "call_function" and node.meta["phase"] == "forward":
            path = node.meta["operator"].split("/")[0]
            for block in blocks:
                if path == block or path.startswith(f"{block}."):
                    found[block] = node.meta["operator"]
    return [found[block] for block in blocks]


def plan_of_stages(name: str, micro_batches: int, dims: Mapping[str, int]) -> tuple[MicroProgram, Plan]:
    """The step in micro-batches, and the plan of one of them on the mesh `dims` of a stage."""
    return micro_program(name, micro_batches), _planned(name, micro_batches, tuple(dims.items()))


@functools.lru_cache
def _planned(name: str, micro_batches: int, sizes: tuple[tuple[str, int], ...]) -> Plan:
    dims = dict(sizes)
    alone = math.prod(dims.values()) == 1
    dims = {"tp": 2} if alone else dims
    request = Request(
        cluster=Cluster.parse(f"1x{math.prod(dims.values())} H100-SXM"),
        dims=dims,
        precision=CASES[name].options.get("precision"),
        kernels=(),
        with_baselines=False,
        mode="fast",
    )
    plan = make_plan(micro_program(name, micro_batches).program, request).with_(kernel_backend="eager")
    return one_device_plan(plan) if alone else plan


def pipeline_plan(
    name: str,
    blocks: Sequence[str],
    schedule: str,
    micro_batches: int,
    dims: Mapping[str, int],
    chunks: int = 1,
) -> Plan:
    """A plan of a case whose stages end behind `blocks`, each on a mesh of `dims`."""
    micro, plan = plan_of_stages(name, micro_batches, dims)
    return with_stages(micro, plan, blocks, schedule, chunks)


def with_stages(micro: MicroProgram, plan: Plan, blocks: Sequence[str], schedule: str, chunks: int = 1) -> Plan:
    """`plan_of_stages` with stages that end behind `blocks`."""
    return with_pipeline(
        plan, block_ends(micro, blocks), schedule, micro.count, chunks=chunks, fingerprint=fingerprint(micro.program)
    )


def unequal_plan(
    name: str, blocks: Sequence[str], schedule: str, micro_batches: int, sizes: Sequence[int], axis: str
) -> Plan:
    """Stage i on a rank group of `sizes[i]` ranks, each group with a plan of its own; the last stage has rank 0."""
    parts = [plan_of_stages(name, micro_batches, {axis: size}) for size in sizes]
    micro, plans = parts[0][0], [plan for _, plan in parts]
    groups = tuple(
        RankGroup(
            first_rank=sum(sizes[index + 1 :]),
            shape=(size,),
            parameters=plan.parameters,
            operators=plan.operators,
            inputs=plan.inputs,
            buffers=plan.buffers,
            outputs=plan.outputs,
        )
        for index, (size, plan) in enumerate(zip(sizes, plans, strict=True))
    )
    whole = with_stages(micro, plans[0], blocks, schedule)
    assert whole.pipeline is not None
    return whole.with_(
        mesh=Mesh((PIPELINE_AXIS, axis), (len(sizes), max(sizes))), pipeline=replace(whole.pipeline, groups=groups)
    )


def gathering_once(plan: Plan) -> Plan:
    """Every stage gathers its parameters once per step."""
    assert plan.pipeline is not None
    stages = tuple(replace(stage, gather_once=True) for stage in plan.pipeline.stages)
    return plan.with_(pipeline=replace(plan.pipeline, stages=stages))


def recomputing(plan: Plan, without: str) -> Plan:
    """Every operator of forward is computed again in backward, but those whose name holds `without`."""
    operators = {
        name: replace(operator, recompute=without not in name and not name.endswith("/bwd"))
        for name, operator in plan.operators.items()
    }
    return plan.with_(operators=operators)

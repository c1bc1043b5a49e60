"""One fuzz case from its seed: a graph under a plan, lowered for every rank, run together, compared with plain."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.layouts.placement import replicated
from autopar.ops.random_index import reference_seed
from autopar.passes.lowering.chain import lowered_step, split
from autopar.planner.problem.graph_operators import operators
from autopar.plans.parallel_plan import Plan
from benchmarks.fuzz.graphs import RandomGraph, random_graph
from benchmarks.fuzz.plans import MESHES, random_plan
from tests.passes.local_blocks import assemble, distribute
from tests.rules.case_values import Case
from tests.rules.operator_cases import CASES
from tests.simulated_ranks import run_ranks

TOLERANCE = 1e-7


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one seed. targets: its operators; num_sharded: how many of them an axis splits; problem: empty
    where every returned value agrees; graph: the graph with its plan, to read."""

    seed: int
    targets: tuple[str, ...]
    num_sharded: int
    problem: str
    graph: str


def check_seed(seed: int, cases: Sequence[Case] = CASES, steps: int = 5) -> Outcome:
    """Draw graph and plan from `seed`, run, compare. Never raises for a mismatch: it is the outcome's `problem`."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    drawn = random_graph(rng, cases, steps)
    mesh = rng.choice(MESHES)
    plan = random_plan(drawn.program, mesh, rng)
    try:
        problem = _compare(drawn, plan)
    except (AutoparError, AssertionError, RuntimeError, LookupError, ValueError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    return Outcome(
        seed=seed,
        targets=tuple(str(node.target) for node in operators(drawn.program)),
        num_sharded=sum(any(name is not None for name in entry.axes) for entry in plan.operators.values()),
        problem=problem,
        graph=describe(drawn, plan),
    )


def describe(drawn: RandomGraph, plan: Plan) -> str:
    """The graph with the strategy of every operator, to read."""
    lines = [f"mesh {plan.mesh.shape}"]
    names = dict(zip(drawn.program.placeholders, drawn.program.inputs, strict=True))
    for node in drawn.program.graph.nodes:
        value = node.meta.get("val")
        shape = list(value.shape) if isinstance(value, Tensor) else ""
        if node.op == "placeholder":
            lines.append(f"{node.name}: {shape} {_layouts([plan.inputs[names[node].name]])}")
            continue
        lines.append(f"{node.name}: {shape} = {node.target}{node.args}{dict(node.kwargs) or ''}")
        entry = plan.operators.get(node.meta.get("operator", ""))
        if entry is not None and node.target is not operator.getitem:
            lines.append(f"    {entry.axes} {_layouts(entry.inputs)} -> {_layouts(entry.outputs)}")
    return "\n".join(lines)


def _layouts(layouts: Sequence[Sequence[object]]) -> str:
    return ", ".join("[" + " ".join(map(str, layout)) + "]" for layout in layouts)


def _compare(drawn: RandomGraph, plan: Plan) -> str:
    """The first returned value that differs, or nothing."""
    program, mesh = drawn.program, plan.mesh
    stages = [lowered_step(program, plan, rank, until=split).only for rank in range(mesh.size)]
    lowered, graphs = [stage.program for stage in stages], [stage.partition.forward for stage in stages]
    blocks: list[list[Tensor]] = [[] for _ in range(mesh.size)]
    for meaning in lowered[0].inputs:
        seeded = meaning.role == "seed"
        value = reference_seed(torch.device("cpu")) if seeded else drawn.tensors[meaning.name]
        layout = replicated(len(mesh.shape)) if seeded else plan.inputs[meaning.name]
        for rank, block in enumerate(distribute(value, layout, mesh)):
            blocks[rank].append(block)
    returned = run_ranks(graphs, blocks, mesh)
    for at, (output, node) in enumerate(zip(program.outputs, program.returned, strict=True)):
        layout = plan.outputs[output.name]
        for expected, values in _real_parts(node.meta["val"], [each[at] for each in returned]):
            found = assemble(values, tuple(expected.shape), layout, mesh)
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            difference = float((found - expected).abs().max()) if expected.numel() else 0.0
            if difference > TOLERANCE * max(scale, 1.0):
                return f"{node} ({node.target}) differs by {difference:.3g} of {scale:.3g}"
    return ""


def _real_parts(expected: Tensor, values: list[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """The value and the blocks of all ranks as fp64: two of them for complex numbers."""
    if not expected.is_complex():
        return [(expected.double(), values)]
    return [(expected.real.double(), [v.real for v in values]), (expected.imag.double(), [v.imag for v in values])]

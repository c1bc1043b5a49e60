"""Random valid plans: every operator runs under any strategy that the planner may choose, every input lies anywhere.

Operands that a strategy wants as Partial are possible only where the value behind them is Partial already.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from torch import fx

from autopar.layouts.placement import Layout, Mesh, Partial, Replicate, Shard, is_legal, replicated
from autopar.planner.problem.axis_choices import choices_of
from autopar.planner.problem.factorisation import Factorisation, Value
from autopar.planner.problem.graph_operators import base_of, operators, whole_rule
from autopar.planner.problem.strategies import Strategies, enumerate_strategies
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import OperatorPlan, Prediction
from autopar.program import Program
from autopar.rules.engine import rule_for, tensor_operands

MESHES = (Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a",), (4,)), Mesh(("a", "b"), (2, 2)))
LAYOUT_TRIES = 6


def random_plan(program: Program, mesh: Mesh, rng: random.Random) -> Plan:
    """A plan in which every choice is drawn at random among the valid ones."""
    factorisation = Factorisation(program)
    made: dict[Value, Layout] = {}
    inputs: dict[str, Layout] = {}
    for node, meaning in zip(program.placeholders, program.inputs, strict=True):
        inputs[meaning.name] = made[node, 0] = random_layout(meaning.shape, mesh, rng)
    entries = {}
    for node in operators(program):
        entry = _random_entry(node, factorisation, mesh, made, rng)
        entries[node.meta["operator"]] = entry
        made.update({(node, index): layout for index, layout in enumerate(entry.outputs)})
    returned = {o.name: n for o, n in zip(program.outputs, program.returned, strict=True)}
    return Plan(
        mesh=mesh,
        parameters={},
        operators=entries,
        inputs=inputs,
        buffers={},
        outputs={name: random_layout(tuple(node.meta["val"].shape), mesh, rng) for name, node in returned.items()},
        predicted=Prediction(step_seconds=0.0, peak_bytes=0.0),
        objective_seconds=0.0,
        bound_seconds=0.0,
        gap=0.0,
        fingerprint="",
        cluster="",
        profile="",
    )


def random_layout(shape: tuple[int, ...], mesh: Mesh, rng: random.Random) -> Layout:
    """A legal layout of a whole tensor; sharded, strided too, where the draws fit."""
    for _ in range(LAYOUT_TRIES):
        layout = tuple(_random_placement(shape, rng) for _ in mesh.shape)
        if is_legal(shape, layout, mesh):
            return layout
    return replicated(len(mesh.shape))


def _random_placement(shape: tuple[int, ...], rng: random.Random) -> Replicate | Shard:
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    if not dims or rng.random() < 0.3:
        return Replicate()
    dim = rng.choice(dims)
    splits = [split for split in (2, 3, 4) if shape[dim] % split == 0 and shape[dim] > split]
    return Shard(dim, rng.choice(splits)) if splits and rng.random() < 0.2 else Shard(dim)


def _random_entry(
    node: fx.Node, factorisation: Factorisation, mesh: Mesh, made: Mapping[Value, Layout], rng: random.Random
) -> OperatorPlan:
    rule = rule_for(node) or whole_rule(node)
    choices = choices_of(node, rule, factorisation)
    strategies = enumerate_strategies(node, [choices] * len(mesh.shape), mesh)
    assert strategies is not None, f"{node}: not even replication is a strategy"
    possible = [s for s in range(len(strategies)) if _is_possible(strategies, s, node, made)]
    drawn = rng.choice(possible)
    everywhere = replicated(len(mesh.shape))
    return OperatorPlan(
        axes=strategies.axes[drawn],
        inputs=tuple(each.distinct[each.index[drawn]] for each in strategies.inputs),
        outputs=tuple(everywhere if each is None else each.distinct[each.index[drawn]] for each in strategies.outputs),
    )


def _is_possible(strategies: Strategies, index: int, node: fx.Node, made: Mapping[Value, Layout]) -> bool:
    for operand, layouts in zip(tensor_operands(node), strategies.inputs, strict=True):
        wanted, have = layouts.distinct[layouts.index[index]], made[base_of(operand)[0]]
        if any(isinstance(w, Partial) and w != h for w, h in zip(wanted, have, strict=True)):
            return False
    return True

"""Random valid plans: every operator runs under any strategy that the planner may choose, every input lies anywhere.

Operands that a strategy wants as Partial are possible only where the value behind them is Partial already.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence

from torch import fx

from autopar.layouts.placement import Layout, Mesh, Partial, Replicate, Shard, is_legal, replicated
from autopar.planner.problem.axis_choices import choices_of, shard_choices
from autopar.planner.problem.factorisation import Factorisation, Value, sequence_class
from autopar.planner.problem.graph_operators import base_of, operators, whole_rule
from autopar.planner.problem.strategies import AxisChoice, Strategies, enumerate_strategies
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION, OperatorPlan, ParameterPlan, Prediction
from autopar.program import Program
from autopar.rules.alternatives import alternatives_of, rule_as
from autopar.rules.engine import tensor_operands

MESHES = (Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a",), (4,)), Mesh(("a", "b"), (2, 2)))
LAYOUT_TRIES = 6
_HANDED_OUT = ("loss", "output")


def random_plan(
    program: Program,
    mesh: Mesh,
    rng: random.Random,
    *,
    balanced: Hashable = None,
    factorisation: Factorisation | None = None,
) -> Plan:
    """A plan in which every choice is drawn at random among the valid ones. balanced: what may lie in zigzag order."""
    factorisation = factorisation or Factorisation(program)
    made: dict[Value, Layout] = {}
    stored: dict[str, Layout] = {}
    for node, meaning in zip(program.placeholders, program.inputs, strict=True):
        choices = shard_choices((node, 0), factorisation, balanced)
        stored[meaning.name] = made[node, 0] = random_layout(meaning.shape, mesh, rng, choices)
    entries = {}
    sequence = sequence_class(program, factorisation)
    for node in operators(program):
        entry = _random_entry(node, factorisation, mesh, made, rng, balanced, sequence)
        entries[node.meta["operator"]] = entry
        made.update({(node, index): layout for index, layout in enumerate(entry.outputs)})
    returned = {o.name: n for o, n in zip(program.outputs, program.returned, strict=True) if o.role in _HANDED_OUT}
    by_role = {
        role: {entry.name: stored[entry.name] for entry in program.inputs if entry.role == role}
        for role in ("parameter", "input", "buffer")
    }
    return Plan(
        mesh=mesh,
        parameters={
            name: ParameterPlan(stored=layout, used=layout, gradient=layout)
            for name, layout in by_role["parameter"].items()
        },
        operators=entries,
        inputs=by_role["input"],
        buffers=by_role["buffer"],
        outputs={name: random_layout(tuple(node.meta["val"].shape), mesh, rng) for name, node in returned.items()},
        predicted=Prediction(step_seconds=0.0, peak_bytes=0.0),
        objective_seconds=0.0,
        bound_seconds=0.0,
        gap=0.0,
        fingerprint="",
        cluster="",
        profile="",
    )


def random_layout(
    shape: tuple[int, ...], mesh: Mesh, rng: random.Random, choices: Sequence[AxisChoice] = ()
) -> Layout:
    """A legal layout of a whole tensor; sharded, strided too, where the draws fit. choices: of which some may lie in
    zigzag order, which is drawn as often as any other layout."""
    turned = [choice.inputs[0] for choice in choices if choice.zigzag]
    for _ in range(LAYOUT_TRIES):
        draws_turned = turned and rng.random() < 0.5
        layout = tuple(
            rng.choice((*turned, Replicate())) if draws_turned else _random_placement(shape, rng) for _ in mesh.shape
        )
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
    node: fx.Node,
    factorisation: Factorisation,
    mesh: Mesh,
    made: Mapping[Value, Layout],
    rng: random.Random,
    balanced: Hashable,
    sequence: Hashable,
) -> OperatorPlan:
    way = rng.choice((DEFAULT_IMPLEMENTATION, *_rings(node)))
    rule = rule_as(node, way) or whole_rule(node)
    choices = choices_of(node, rule, factorisation, balanced, sequence)
    if balanced is not None and rng.random() < 0.5:
        choices = [c for c in choices if c.atom_class == balanced] or choices
    strategies = enumerate_strategies(node, [choices] * len(mesh.shape), mesh)
    if strategies is None:
        return _random_entry(node, factorisation, mesh, made, rng, balanced, sequence)
    possible = [s for s in range(len(strategies)) if _is_possible(strategies, s, node, made)]
    if not possible:
        return _random_entry(node, factorisation, mesh, made, rng, balanced, sequence)
    drawn = rng.choice(possible)
    everywhere = replicated(len(mesh.shape))
    return OperatorPlan(
        axes=strategies.axes[drawn],
        inputs=tuple(each.distinct[each.index[drawn]] for each in strategies.inputs),
        outputs=tuple(everywhere if each is None else each.distinct[each.index[drawn]] for each in strategies.outputs),
        implementation=way,
    )


def _rings(node: fx.Node) -> list[str]:
    """The alternatives that compute the same values."""
    return [way.name for way in alternatives_of(node) if way.precision is None]


def _is_possible(strategies: Strategies, index: int, node: fx.Node, made: Mapping[Value, Layout]) -> bool:
    for operand, layouts in zip(tensor_operands(node), strategies.inputs, strict=True):
        wanted, have = layouts.distinct[layouts.index[index]], made[base_of(operand)[0]]
        if any(isinstance(w, Partial) and w != h for w, h in zip(wanted, have, strict=True)):
            return False
    return True

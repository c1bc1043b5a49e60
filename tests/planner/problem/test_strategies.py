"""The strategies of one operator: what a product over the axes leaves, read off by numpy and checked by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import fx

from autopar.layouts.placement import Mesh, Partial, Replicate, Shard, is_legal
from autopar.layouts.views import canonical
from autopar.planner.problem.axis_choices import choices_of
from autopar.planner.problem.factorisation import Factorisation, shape_of
from autopar.planner.problem.strategies import (
    MOST_CHANGES,
    AxisChoice,
    LayoutSet,
    Strategies,
    divides,
    enumerate_strategies,
)
from autopar.rules.engine import rule_for
from tests.planner.problems import captured_mlp

MESHES = [("a", (4,)), ("ab", (2, 4)), ("ab", (3, 2)), ("abc", (2, 2, 2)), ("abcd", (2, 2, 2, 2))]


def product(batch: int = 16) -> tuple[fx.Node, tuple[AxisChoice, ...]]:
    """The first matrix product of the MLP, (batch, 64) x (64, 256), and its choices."""
    program = captured_mlp(batch)
    node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.mm.default)
    rule = rule_for(node)
    assert rule is not None
    return node, tuple(choices_of(node, rule, Factorisation(program)))


def on(mesh: Mesh, batch: int = 16) -> tuple[fx.Node, tuple[AxisChoice, ...], Strategies]:
    node, choices = product(batch)
    found = enumerate_strategies(node, [choices] * len(mesh.shape), mesh)
    assert found is not None
    return node, choices, found


def divide(combination: tuple[AxisChoice, ...], mesh: Mesh) -> bool:
    cuts: dict[object, int] = {}
    for axis, choice in enumerate(combination):
        cuts[choice.part] = cuts.get(choice.part, 1) * mesh.shape[axis]
    return all(c.part is None or divides(c.atom, cuts[c.part], c.may_be_uneven) for c in combination)


@pytest.mark.parametrize("batch", [16, 30])
@pytest.mark.parametrize(("names", "shape"), MESHES)
def test_they_are_the_product_of_the_choices_less_what_does_not_divide(
    names: str, shape: tuple[int, ...], batch: int
) -> None:
    mesh = Mesh(tuple(names), shape)
    node, choices, found = on(mesh, batch)
    expected = []
    for combination in itertools.product(choices, repeat=len(shape)):
        changes = sum(one is not other for one, other in itertools.pairwise(combination))
        output = canonical(shape_of(node), tuple(c.outputs[0] or Replicate() for c in combination), shape)
        if divide(combination, mesh) and is_legal(shape_of(node), output, mesh) and changes <= MOST_CHANGES:
            expected.append((tuple(c.name for c in combination), output))
    outputs = found.outputs[0]
    assert outputs is not None
    assert expected == [(axes, outputs.distinct[i]) for axes, i in zip(found.axes, outputs.index, strict=True)]


def test_fractions_multiply_the_cuts_and_round_up() -> None:
    _, _, found = on(Mesh(("a", "b"), (2, 4)), batch=30)
    by_axes = dict(zip(found.axes, found.fraction, strict=True))
    assert by_axes[None, None] == 1.0
    assert by_axes["m", None] == 15 / 30
    assert by_axes["n", "n"] == 1 / 8
    assert by_axes["n", "m"] == pytest.approx(math.ceil(30 / 4) / 30 / 2)


def test_what_is_left_out_on_four_axes_is_counted_and_three_axes_lose_nothing() -> None:
    _, choices, found = on(Mesh(("a", "b", "c", "d"), (2, 2, 2, 2)))
    assert len(found) + found.left_out == len(choices) ** 4
    assert ("m", "n", "k", "m") not in found.axes
    assert ("m", "m", "n", "k") in found.axes
    assert on(Mesh(("a", "b", "c"), (2, 2, 2)))[2].left_out == 0


def test_axes_that_ask_for_four_different_choices_get_them() -> None:
    node, choices = product()
    names: dict[str | None, AxisChoice] = {choice.name: choice for choice in choices}
    asked = [[names["m"]], [names["n"]], [names["m"]], [names["k"]]]
    found = enumerate_strategies(node, asked, Mesh(("a", "b", "c", "d"), (2, 2, 2, 2)))
    assert found is not None
    assert found.axes == (("m", "n", "m", "k"),)


def test_taking_rows_numbers_the_layouts_anew_in_the_order_of_their_use() -> None:
    r, s, p = (Replicate(),), (Shard(0),), (Partial(),)
    layouts = LayoutSet.of([r, s, p, s, r], (8,), Mesh(("a",), (2,)))
    taken = layouts.take(np.array([3, 2, 1]))
    assert taken.distinct == (s, p)
    assert taken.index.tolist() == [0, 1, 0]

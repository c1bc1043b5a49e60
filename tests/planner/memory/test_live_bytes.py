"""What a step holds of a parameter: itself and its state, its gradient once it is finished, copies of the update."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.live_bytes import find_live_bytes
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.strategies import local_fraction
from tests.planner.problems import build, captured_mlp

MESH = Mesh(("dp",), (4,))


@pytest.mark.parametrize("update", [0.0, 2.0])
def test_a_parameter_is_held_with_its_state_and_its_gradient_from_where_it_is_finished(update: float) -> None:
    program = captured_mlp()
    built, lifetimes = build(program, Cluster.parse("4 cpu"), MESH), Lifetimes(program)
    state = StateBytes(gradient=3.0, optimizer=7.0, step_traffic=0.0, update=update)
    parameters = {
        node: index for node, index in built.placeholders.items() if built.variables[index].kind == "parameter"
    }
    names = {built.variables[index].name: state for index in parameters.values()}
    held = find_live_bytes(built, MESH, names, lifetimes)
    assert len(parameters) == 4
    for node, index in parameters.items():
        shape = shape_of(node)
        stored = [local_fraction(label.stored, shape, MESH) for label in built.variables[index].labels]
        elements = math.prod(shape) * np.array(stored)
        pieces = [piece for piece in held if piece.variable == index and piece.last == lifetimes.end]
        finished = lifetimes.gradient_position[node]
        expected = [(0, 4.0 + 7.0), (finished + 1, 3.0)] + [(lifetimes.end, 2.0)] * (update > 0.0)
        assert [piece.first for piece in pieces] == [first for first, _ in expected]
        for piece, (_, bytes_per_element) in zip(pieces, expected, strict=True):
            np.testing.assert_array_equal(piece.bytes, bytes_per_element * elements)

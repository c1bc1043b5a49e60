"""What a step holds of a parameter: itself and its state, its gradient once it is finished, copies of the update; and
of what it saves in less room."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.live_bytes import find_live_bytes
from autopar.planner.memory.possible_forms import allowed_forms
from autopar.planner.memory.recomputation import FORM_STATES, SAVED, expand
from autopar.planner.one_mesh.form_labels import FormLabels
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.optimizer_states import state_bytes
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


def test_what_is_saved_in_a_form_is_small_between_its_readers_and_large_again_for_backward() -> None:
    program, cluster = captured_mlp(), Cluster.parse("4 cpu")
    plain, lifetimes = build(program, cluster, MESH), Lifetimes(program)
    forms = FormLabels(device=cluster.device, mesh=MESH, lifetimes=lifetimes, rounded=allowed_forms("4bit"), count=1)
    candidates = forms.candidates(plain)
    built = forms.added(expand(plain, lifetimes), candidates)
    gelu = next(node for node in candidates if node.meta["operator"] == "/gelu#0")
    index = built.operators[gelu]
    held = np.zeros((lifetimes.end + 1, len(built.variables[index].costs)))
    for piece in find_live_bytes(built, MESH, state_bytes(program, None), lifetimes):
        if piece.variable == index:
            held[piece.first : piece.last + 1] += piece.bytes
    saved, small = (held[:, built.variables[index].availability == state] for state in (SAVED, FORM_STATES["4bit"]))
    made, reads = lifetimes.position[gelu], lifetimes.backward_readers[gelu, 0]
    wanted = min(lifetimes.position[reader] for reader in reads)
    part = (4 + 64 / 256) / 32
    whole = saved[made + 1]
    np.testing.assert_allclose(small[made] - saved[made], part * whole)
    np.testing.assert_allclose(small[made + 1 : wanted], np.broadcast_to(part * whole, (wanted - made - 1, len(whole))))
    np.testing.assert_allclose(small[wanted], (1 + part) * whole)
    assert whole.min() > 0

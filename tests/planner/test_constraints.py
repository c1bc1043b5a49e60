"""Meshes and constraints: what is accepted, and errors that say what to write."""

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError
from autopar.layout import Mesh, Shard
from autopar.planner.constraints import check_axes, parse_constraints
from autopar.planner.mesh_shapes import resolve_meshes


def meshes(num_devices: int, mesh: object = None, dims: object = None) -> list[Mesh]:
    return resolve_meshes(num_devices, mesh, dims, lambda message: None)  # type: ignore[arg-type]


def test_all_one_and_two_dimensional_factorisations_are_tried() -> None:
    assert {mesh.shape for mesh in meshes(8)} == {(8,), (2, 4), (4, 2)}


def test_a_prime_number_of_devices_has_one_mesh() -> None:
    assert [mesh.shape for mesh in meshes(7)] == [(7,)]


def test_minus_one_fills_and_the_rest_is_a_free_outer_axis() -> None:
    assert meshes(8, dims={"dp_shard": -1, "tp": 2})[0] == Mesh(("dp_shard", "tp"), (4, 2))
    assert meshes(8, dims={"tp": 4})[0] == Mesh(("outer", "tp"), (2, 4))


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({"tp": 3}, "do not divide 8"),
        ({"cp": 2}, "later version"),
        ({"tensor": 2}, "unknown axis"),
        ({"tp": 0}, "size 0"),
        ({"tp": -1, "dp_shard": -1}, "do not divide"),
    ],
)
def test_impossible_dims_say_why(dims: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        meshes(8, dims=dims)


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the cluster 8"):
        meshes(8, mesh=(3, 2))


def test_constraints_name_parameters_and_axes() -> None:
    constraints = parse_constraints({"*.weight": {"tp": "S(0)"}})
    assert constraints.placements == {"*.weight": {"tp": Shard(0)}}
    check_axes(constraints, Mesh(("tp",), (2,)), ["a.weight"])
    with pytest.raises(ConfigurationError, match="names axis 'tp'"):
        check_axes(constraints, Mesh(("inner",), (2,)), ["a.weight"])
    with pytest.raises(ConfigurationError, match="matches no parameter"):
        check_axes(constraints, Mesh(("tp",), (2,)), ["bias"])


def test_an_unknown_constraint_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no_replicated_compute"):
        parse_constraints("fast")


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_a_batch_of_one_lets_operators_go(axis: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = autopar.plan(model, torch.randn(1, 6, 8), cluster="4 H100-SXM", dims={axis: 4}, loss_fn=squares)
    assert all(entry.axes != ("partial",) for name, entry in plan.operators.items() if "add" in name)
    assert plan.gap < 1e-9


def squares(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()

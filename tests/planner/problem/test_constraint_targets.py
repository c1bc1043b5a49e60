"""Targets: what a pattern means, in whose dims a placement counts, and errors that say what to write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import ConfigurationError
from autopar.layouts.placement import Mesh, Replicate, Shard
from autopar.planner.problem.constraint_targets import (
    BoundConstraint,
    bind_constraints,
    freed_axes,
    meshes_with_axes,
    notes_of,
)
from autopar.planner.problem.factorisation import Factorisation
from autopar.program import Program
from autopar.request.constraints import EVERY_AXIS, parse_constraints

DP_TP = Mesh(("dp_shard", "tp"), (4, 2))


class Block(nn.Module):
    """Two linear layers, as (B, S, D) -> (B, S, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(x)))
        return hidden


class Stack(nn.Module):
    """Two blocks and a head; the loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits.pow(2).mean()


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        return capture(Stack(), (torch.empty(16, 4, 8),), {})


def wishes(program: Program, constraints: object) -> tuple[BoundConstraint, ...]:
    return bind_constraints(program, parse_constraints(constraints), Factorisation(program))


def test_parameters_come_before_modules_and_modules_before_operators(program: Program) -> None:
    kinds = {
        pattern: wishes(program, {pattern: "R"})[0].kind
        for pattern in ("layers.*.up.weight", "layers.*", "layers.0", "layers.0.up/*", "head/mm#*/bwd")
    }
    assert kinds == {
        "layers.*.up.weight": "parameters",
        "layers.*": "parameters",
        "layers.0": "outputs of modules",
        "layers.0.up/*": "operators",
        "head/mm#*/bwd": "operators",
    }


def test_a_bare_placement_holds_on_every_axis(program: Program) -> None:
    (bare,) = wishes(program, {"head.weight": Replicate()})
    (named,) = wishes(program, {"head.weight": {"tp": "S(0)"}})
    assert (bare.axis, bare.axes(DP_TP)) == (EVERY_AXIS, [0, 1])
    assert named.axes(DP_TP) == [1]


def test_dims_of_a_module_are_those_before_flattening(program: Program) -> None:
    (wish,) = wishes(program, {"layers.0.up": {"tp": "S(1)"}})
    (target,) = wish.targets
    assert target.user_shape == (16, 4, 16)
    lies = {
        str(layout): target.lies(layout, 1, wish.placement, DP_TP)
        for layout in ((Replicate(), Shard(0, 16)), (Replicate(), Shard(0)), (Replicate(), Shard(1)))
    }
    assert list(lies.values()) == [True, False, False]


def test_nested_cuts_of_the_batch_are_told_from_the_sequence(program: Program) -> None:
    """On dp 4 x tp 2 over batch 16 both (S(0), S(0)): the second axis still cuts the batch, not the sequence."""
    (wish,) = wishes(program, {"layers.0.up": {"tp": "S(1)"}})
    (target,) = wish.targets
    assert not target.lies((Shard(0), Shard(0)), 1, wish.placement, DP_TP)


def test_a_dim_may_count_from_the_end(program: Program) -> None:
    (wish,) = wishes(program, {"head": Shard(-1)})
    assert wish.placement == Shard(len(wish.targets[0].user_shape) - 1)


def test_weights_of_a_constrained_operator_are_free_too(program: Program) -> None:
    freed = freed_axes(wishes(program, {"head/mm#0": {"tp": "R"}}), DP_TP)
    assert {str(node.meta["operator"]): axes for node, axes in freed.items()} == {
        "head/mm#0": (1,),
        "head.weight": (1,),
    }


def test_the_plan_tells_what_a_pattern_was_taken_for(program: Program) -> None:
    (note,) = notes_of(wishes(program, {"layers.*.up.weight": {"tp": "S(0)"}}))
    assert note == "constraint 'layers.*.up.weight': S(0) on tp: 2 parameters, as layers.0.up.weight (16, 8)"


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"layers.*.upp.weight": "R"}, r"matches no parameter, module or operator; nearest: layers\.\d\.up\.weight"),
        ({"head.bias": "S(1)"}, r"head\.bias cannot be .* S\(1\): its shape is \(32,\)"),
        ({"head.weight": "S(x)"}, r"'head\.weight': 'S\(x\)' is no placement"),
        ({"head.weight": {}}, "is empty"),
        ({3: "R"}, "a pattern is a text"),
        (["head"], "no_replicated_compute"),
        ("fast", "no_replicated_compute"),
    ],
)
def test_what_cannot_be_meant_is_named(program: Program, constraints: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        wishes(program, constraints)


def test_meshes_without_a_named_axis_are_not_searched() -> None:
    meshes = [Mesh(("inner",), (8,)), Mesh(("outer", "inner"), (2, 4))]
    rules = parse_constraints({"*": {"outer": "R"}}).placements
    assert meshes_with_axes(rules, meshes) == meshes[1:]
    assert meshes_with_axes({}, meshes) == meshes


def test_an_axis_that_no_mesh_has_is_named_with_those_that_exist() -> None:
    rules = parse_constraints({"*": {"tp": "R"}}).placements
    with pytest.raises(ConfigurationError, match=r"names axis 'tp'; the mesh has inner; dims= .* dims=\{'tp': 2\}"):
        meshes_with_axes(rules, [Mesh(("inner",), (8,))])

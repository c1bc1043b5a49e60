"""Classes and skeleton: the layers of a model are one class, until somebody says otherwise by name."""

from collections import Counter

import torch
from torch import nn

from autopar.capture import capture
from autopar.layouts.placement import Mesh
from autopar.planner.problem.build import build_problem
from autopar.planner.problem.factorisation import Factorisation
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.planner.problem.prices import Prices
from autopar.planner.problem.read_skeleton import skeleton_of
from autopar.planner.problem.skeleton import Skeleton
from autopar.planner.problem.slot_classes import classify
from autopar.program import Program
from autopar.request.constraints import Constraints
from tests.planner.problem.test_build import H100


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, width, bias=False)
        self.right = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.left(x)) * torch.sigmoid(self.right(x))


class Stack(nn.Module):
    """forward(x (B, W)) -> mean."""

    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def captured(layers: int) -> Program:
    with torch.device("meta"):
        return capture(Stack(layers), (torch.empty(16, 32),), {})


def skeleton(program: Program) -> Skeleton:
    return skeleton_of(program, "inductor", Factorisation(program))


def test_more_layers_bring_more_slots_and_links_but_no_class() -> None:
    small, large = skeleton(captured(4)), skeleton(captured(8))
    few, many = classify(small, {}), classify(large, {})
    assert len(large.slots) > 1.5 * len(small.slots)
    assert len(few.slots) == len(many.slots)
    assert len(few.links) == len(many.links)


def test_variables_of_one_class_share_their_arrays() -> None:
    program = captured(6)
    mesh = Mesh(("a", "b"), (2, 2))
    prices, state = Prices(H100, mesh), state_bytes(program, "AdamW")
    factorisation = Factorisation(program)
    built = build_problem(program, mesh, prices, Constraints(), state, "inductor", factorisation)
    weights = {id(v.costs) for v in built.variables if v.name.startswith("layers.") and v.kind == "parameter"}
    assert len(weights) == 1
    tables = Counter(id(edge.costs) for edge in built.problem.edges)
    assert len(tables) < len(built.problem.edges) / 3


def test_a_slot_with_a_mark_is_a_class_of_its_own_and_so_are_its_links() -> None:
    found = skeleton(captured(4))
    plain = classify(found, {})
    slot = next(i for i, s in enumerate(found.slots) if s.name == "layers.2.left.weight")
    marked = classify(found, {slot: "pinned"})
    assert marked.of_slot.count(marked.of_slot[slot]) == 1
    assert plain.of_slot.count(plain.of_slot[slot]) > 1
    assert len(marked.links) > len(plain.links)


def test_a_value_with_several_readers_is_found_with_its_shared_copy() -> None:
    found = skeleton(captured(2))
    copied = {slot.name for slot in found.slots if slot.kind == "copy"}
    for link in found.links:
        if found.slots[link.target].kind == "operator" and found.slots[link.source].kind != "copy":
            assert found.slots[link.source].name not in copied or found.slots[link.source].kind == "parameter"
    into, readers = next(iter(found.copies_of.values()))
    assert found.slots[into.target].kind == "copy"
    assert len(readers) >= 2


def test_the_skeleton_is_read_once_per_backend() -> None:
    program = captured(1)
    factorisation = Factorisation(program)
    first = skeleton_of(program, "eager", factorisation)
    assert skeleton_of(program, "eager", factorisation) is first
    assert skeleton_of(program, "inductor", factorisation) is not first

"""Atoms: dims that are the same thing are found through views and fused dims."""

import torch
from torch import fx, nn

from autopar.capture import capture
from autopar.planner.problem.factorisation import Factorisation
from autopar.program import Program
from autopar.rules.engine import rule_for


class Heads(nn.Module):
    """(B, S, 24) -> three heads of 8 -> sum."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(24, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        return self.project(x).view(batch, seq, 3, 8).softmax(-1).sum()


def captured() -> Program:
    return capture(Heads(), (torch.randn(4, 5, 24),), {})


def matmul(program: Program) -> fx.Node:
    return next(n for n in program.graph.nodes if n.target is torch.ops.aten.mm.default)


def test_tokens_of_a_flattened_matmul_have_the_atoms_batch_and_sequence() -> None:
    program = captured()
    assert Factorisation(program).name_atoms(matmul(program), "m", 20) == (4, 5)


def test_heads_behind_a_view_cut_the_output_of_the_projection() -> None:
    program = captured()
    assert Factorisation(program).name_atoms(matmul(program), "n", 24) == (3, 8)


def test_the_batch_of_the_input_and_of_the_matmul_are_one_class() -> None:
    program = captured()
    factorisation = Factorisation(program)
    batch = next(n for n, e in zip(program.placeholders, program.inputs, strict=True) if e.role == "input")
    assert factorisation.atom_class((batch, 0), 0) == factorisation.name_atom_class(matmul(program), "m", 0)
    assert factorisation.atom_class((batch, 0), 0) != factorisation.name_atom_class(matmul(program), "m", 1)


class Shifted(nn.Module):
    """A causal convolution, cut to the length of its input, beside a shift by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 3, 4, padding=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.convolution(x)[..., : x.shape[-1]] * x)[..., 1:].sum()
        return out


def test_a_dim_of_a_few_rows_more_is_the_same_thing_as_the_one_of_which_it_is_made() -> None:
    program = capture(Shifted(), (torch.randn(2, 3, 24),), {})
    factorisation = Factorisation(program)
    lengths: dict[int, list[object]] = {27: [], 24: [], 23: []}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[-1] in lengths:
            lengths[value.shape[-1]].append(factorisation.atom_class((node, 0), 2))
    assert all(lengths.values())
    assert len({one for classes in lengths.values() for one in classes}) == 1


def test_every_view_of_the_model_is_expressible() -> None:
    program = captured()
    assert Factorisation(program).inexpressible_groups == 0
    assert rule_for(matmul(program)) is not None

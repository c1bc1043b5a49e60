"""The recurrence equals its loop over steps, across chunks and in both directions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ops import linear_recurrence as ops


def looped(decay: Tensor, added: Tensor, reverse: bool) -> Tensor:
    """Over dim 1, by autograd's own operators."""
    steps = range(decay.shape[1])
    state, states = torch.zeros_like(added[:, 0]), {}
    for at in reversed(steps) if reverse else steps:
        state = states[at] = decay[:, at] * state + added[:, at]
    return torch.stack([states[at] for at in steps], 1)


@pytest.mark.parametrize("length", [1, 5, ops.CHUNK, 2 * ops.CHUNK + 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_states_and_gradients_are_those_of_the_loop(length: int, reverse: bool) -> None:
    torch.manual_seed(0)
    decay, added = torch.rand(2, length, 3, dtype=torch.float64), torch.randn(2, length, 3, dtype=torch.float64)
    weight = torch.randn(2, length, 3, dtype=torch.float64)
    found = []
    for run in (looped, lambda a, b, r: ops.linear_recurrence(a, b, 1, r)):
        own_decay, own_added = (x.clone().requires_grad_() for x in (decay, added))
        states: Tensor = run(own_decay, own_added, reverse)
        found.append([states, *torch.autograd.grad((states * weight).sum(), (own_decay, own_added))])
    for expected, result in zip(*found, strict=True):
        torch.testing.assert_close(result, expected)


def test_half_precision_runs_in_fp32() -> None:
    decay, added = torch.rand(300).bfloat16(), torch.rand(300).bfloat16()
    expected = looped(decay.float()[None], added.float()[None], False)[0]
    torch.testing.assert_close(ops.linear_recurrence(decay, added, 0, False), expected.bfloat16())


def test_the_operator_is_registered_as_torch_asks() -> None:
    operands = torch.rand(2, 5, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.autopar.linear_recurrence.default, (*operands, 1, False))

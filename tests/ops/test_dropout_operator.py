"""Dropout as an operator: scaled where kept, the same mask in backward, the same mask however the tensor is cut."""

import torch

from autopar.ops import dropout, dropout_by_index
from autopar.ops.random_index import reference_seed


def test_kept_elements_are_scaled() -> None:
    x = torch.randn(50, 40)
    out, mask = dropout(x, 0.25, 0)
    assert torch.allclose(out, x * mask / 0.75)


def test_gradient_uses_the_mask_of_forward() -> None:
    x = torch.randn(50, 40, requires_grad=True)
    out, mask = dropout(x, 0.25, 0)
    out.sum().backward()
    assert torch.allclose(x.grad, mask / 0.75)


def test_cut_tensor_gets_the_mask_of_the_whole() -> None:
    x = torch.randn(6, 10)
    whole, _ = dropout(x, 0.5, 7)
    seed = reference_seed(x.device)
    parts = [dropout_by_index(x[:, s : s + 5], 0.5, seed, 7, (((0, 6),), ((s, 5),)), (6, 10))[0] for s in (0, 5)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_dropping_everything_gives_zeros() -> None:
    assert not dropout(torch.ones(4), 1.0, 0)[0].any()


def test_operators_are_well_formed() -> None:
    torch.library.opcheck(dropout, (torch.randn(3, 4, requires_grad=True), 0.5, 1))

"""Values of tensors that a model makes from constants are known in a trace; no others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar._compat import FakeTensor
from autopar.capture import capture
from autopar.capture.known_values import LARGEST_KNOWN, KnownValues
from autopar.errors import CaptureError
from tests.capture.test_intake import compare

Forward = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """A linear layer and a buffer of ones around a forward that the test writes."""

    scale: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def choice_by_factory(model: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones_like(x)
    mask[:, 1] = 0
    h: Tensor = model.linear(x)  # type: ignore[operator]
    if (mask == 2).flatten().any().item():
        h = h * 0
    return h.sum() * int(mask.sum())


def numbers_in_a_list(model: nn.Module, x: Tensor) -> Tensor:
    weights = torch.arange(3)
    weights[0] = 5
    h: Tensor = model.linear(x)  # type: ignore[operator]
    for weight in weights.tolist():
        h = h * weight
    return h.sum()


def nonzero_of_factory(model: nn.Module, x: Tensor) -> Tensor:
    picked = (torch.arange(4) % 2).nonzero().flatten()
    return model.linear(x)[:, picked].sum()  # type: ignore[no-any-return, operator]


def unique_of_factory(model: nn.Module, x: Tensor) -> Tensor:
    groups = torch.arange(6).div(2, rounding_mode="floor").unique()
    return model.linear(x)[:, groups].sum()  # type: ignore[no-any-return, operator]


def triangle_of_products(model: nn.Module, x: Tensor) -> Tensor:
    h = model.linear(x)  # type: ignore[operator]
    below = torch.ones(4, 4).tril(-1).bool()
    return (h[:, :, None] * h[:, None, :])[:, below].square().sum()  # type: ignore[no-any-return]


def written_by_triangle(model: nn.Module, x: Tensor) -> Tensor:
    h = model.linear(x)  # type: ignore[operator]
    products = h[:, :, None] * h[:, None, :]
    products[:, torch.ones(4, 4).tril(-1).bool()] = h[:, :1] * torch.ones(6)
    return products.square().sum()  # type: ignore[no-any-return]


KNOWN = (
    choice_by_factory,
    numbers_in_a_list,
    nonzero_of_factory,
    unique_of_factory,
    triangle_of_products,
    written_by_triangle,
)


@pytest.mark.parametrize("forward", KNOWN, ids=lambda forward: forward.__name__)
def test_values_from_factories_decide(forward: Forward) -> None:
    program = compare(Model(forward), (torch.randn(3, 4),), {})
    names = [str(node.target) for node in program.graph.nodes]
    assert not any("nonzero" in name or "unique" in name or "_local_scalar" in name for name in names)
    values = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), FakeTensor)]
    assert all(value.constant is None for value in values), "a program holds no values"


def from_input(model: nn.Module, x: Tensor) -> Tensor:
    return model.linear(x).sum() * (torch.ones(4) * x[0]).sum().item()  # type: ignore[no-any-return, operator]


def from_buffer(model: nn.Module, x: Tensor) -> Tensor:
    return model.linear(x).sum() * model.scale.sum().item()  # type: ignore[no-any-return, operator]


def written_through_a_view(model: nn.Module, x: Tensor) -> Tensor:
    total = torch.zeros(4)
    part = total[1:]
    part += model.scale[1:]  # type: ignore[index]
    return model.linear(x).sum() * total.sum().item()  # type: ignore[no-any-return, operator]


def from_dropout(model: nn.Module, x: Tensor) -> Tensor:
    return model.linear(x).sum() * functional.dropout(torch.ones(4)).sum().item()  # type: ignore[no-any-return, operator]


def from_random_numbers(model: nn.Module, x: Tensor) -> Tensor:
    return model.linear(x).sum() * torch.rand_like(torch.ones(4)).sum().item()  # type: ignore[no-any-return, operator]


def from_memory(model: nn.Module, x: Tensor) -> Tensor:
    kept = torch.empty_like(torch.ones(4)).copy_(x[0])
    return model.linear(x).sum() * kept.sum().item()  # type: ignore[no-any-return, operator]


def too_large(model: nn.Module, x: Tensor) -> Tensor:
    return model.linear(x).sum() * torch.ones(LARGEST_KNOWN + 1).sum().item()  # type: ignore[no-any-return, operator]


UNKNOWN = (
    from_input,
    from_buffer,
    written_through_a_view,
    from_dropout,
    from_random_numbers,
    from_memory,
    too_large,
)


@pytest.mark.parametrize("forward", UNKNOWN, ids=lambda forward: forward.__name__)
def test_other_values_are_never_taken(forward: Forward) -> None:
    with pytest.raises(CaptureError, match="decides by the values of a tensor"):
        capture(Model(forward), (torch.randn(3, 4),))


def test_uninitialised_memory_has_no_value() -> None:
    with KnownValues():
        known = torch.ones(4)
        assert known.sum().item() == 4
        assert torch.empty_like(known).constant is None  # type: ignore[attr-defined]
        assert torch.empty(4).constant is None  # type: ignore[attr-defined]


def test_values_are_known_up_to_the_largest_size_and_not_beyond() -> None:
    with KnownValues():
        assert torch.ones(LARGEST_KNOWN).sum().item() == LARGEST_KNOWN
        assert torch.ones(LARGEST_KNOWN + 1).constant is None  # type: ignore[attr-defined]

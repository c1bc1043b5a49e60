"""An MLP in tiles equals the whole one, forward and backward, and makes no hidden tensor larger than a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops import tiled_mlp as ours

ROWS, WIDTH, HIDDEN, OUT = 300, 16, 24, 12
"""Three tiles of 128 rows, the last one shorter."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-6}
KINDS = [("silu", 2, False), ("gelu_tanh", 2, True), ("gelu", 2, False), ("gelu", 1, True), ("relu", 1, True),
         ("relu", 1, False), ("gelu_tanh", 1, True), ("silu", 1, False)]  # fmt: skip
"""(activation, weights in front of it, whether they have biases)."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "LEAST_ROWS", 128)


def operands(dtype: torch.dtype, inputs: int, biased: bool, columns: bool) -> tuple[Any, ...]:
    """grad, x, weights, biases, down."""
    torch.manual_seed(5)
    into, behind = ((WIDTH, HIDDEN), (HIDDEN, OUT)) if columns else ((HIDDEN, WIDTH), (OUT, HIDDEN))
    weights = [torch.randn(into, dtype=dtype) / 4 for _ in range(inputs)]
    biases = [torch.randn(HIDDEN, dtype=dtype) for _ in range(inputs if biased else 0)]
    return torch.randn(ROWS, OUT, dtype=dtype), torch.randn(ROWS, WIDTH, dtype=dtype), weights, biases, torch.randn(
        behind, dtype=dtype
    ) / 4  # fmt: skip


def plain(
    grad: Tensor, x: Tensor, weights: list[Tensor], biases: list[Tensor], down: Tensor, activation: str, columns: bool
) -> list[Tensor]:
    """Result and gradients of the formula by torch, in fp64."""
    leaves = [one.double().requires_grad_() for one in (x, *weights, *biases, down)]
    wide, parameters, last = leaves[0], leaves[1:-1], leaves[-1]
    turned = [one if columns else one.t() for one in parameters[: len(weights)]]
    inner = [wide @ one for one in turned]
    inner = [one + bias for one, bias in zip(inner, parameters[len(weights) :], strict=True)] if biases else inner
    if activation.startswith("gelu"):
        active = functional.gelu(inner[0], approximate="tanh" if activation == "gelu_tanh" else "none")
    else:
        active = getattr(functional, activation)(inner[0])
    hidden = active * inner[1] if len(inner) == 2 else active
    out = hidden @ (last if columns else last.t())
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def distances(dtype: torch.dtype, activation: str, inputs: int, biased: bool, columns: bool) -> list[float]:
    """Of the result, the gradient of x, those of weights, biases and the last weight."""
    grad, *rest = operands(dtype, inputs, biased, columns)
    found = [ours.tiled_mlp(*rest, activation, columns), *ours.tiled_mlp_backward(grad, *rest, activation, columns)]
    exact = plain(grad, *rest, activation, columns)
    assert [one.shape for one in found] == [one.shape for one in exact]
    assert {one.dtype for one in found} == {dtype}
    return [distance(*pair) for pair in zip(found, exact, strict=True)]


@pytest.mark.parametrize("columns", [False, True], ids=["as Linear", "as Conv1D"])
@pytest.mark.parametrize(("activation", "inputs", "biased"), KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_results_and_gradients_are_those_of_the_formula(
    dtype: torch.dtype, activation: str, inputs: int, biased: bool, columns: bool
) -> None:
    assert ours.tile_rows(ROWS, WIDTH) == 128
    assert max(distances(dtype, activation, inputs, biased, columns)) < TOLERANCE[dtype]


def test_a_tile_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = ours._tiles
    monkeypatch.setattr(ours, "_tiles", lambda x: list(tiles(x))[:-1])
    torch.use_deterministic_algorithms(True)  # what is left out is NaN, never what lay there before
    try:
        found = distances(torch.float64, "silu", 2, False, False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not all(distance < 1e-2 for distance in found)


def test_a_gradient_that_is_not_summed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ours._add
    monkeypatch.setattr(ours, "_add", lambda total, result, first, *factors: add(total, result, True, *factors))
    found = distances(torch.float64, "silu", 2, True, False)
    assert max(found[:2]) < 1e-12
    assert min(found[2:]) > 1e-2, "every gradient of a parameter is that of the last tile"


def test_hidden_activations_of_another_tile_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, first = ours._inputs, []

    def stale(x: Tensor, *rest: Any) -> list[Tensor]:
        first.append(inputs(x, *rest))
        return [one[: len(x)] for one in first[0]]

    monkeypatch.setattr(ours, "_inputs", stale)
    assert max(distances(torch.float64, "silu", 2, False, False)) > 1e-2


def test_sums_over_tiles_keep_the_digits_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 many small parts would be lost beside their sum: one row a tile, each of the same gradient."""
    monkeypatch.setattr(ours, "tile_rows", lambda *_: 1)
    one, rows = torch.ones(1, 1).bfloat16(), torch.ones(1000, 1).bfloat16()
    found = ours.tiled_mlp_backward(rows, rows, [one], [one[0]], one, "relu", False)
    assert [float(gradient.sum()) for gradient in found[1:]] == [1000, 1000, 2000]


def test_gradients_in_bf16_are_about_as_far_off_as_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tile adds was rounded once itself."""
    in_tiles = distances(torch.bfloat16, "silu", 2, False, False)
    monkeypatch.setattr(ours, "LEAST_ROWS", ROWS)
    whole = distances(torch.bfloat16, "silu", 2, False, False)
    assert max(a / b for a, b in zip(in_tiles, whole, strict=True)) < 1.25


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return result


@pytest.mark.parametrize(("rows", "width", "hidden"), [(131072, 4096, 14336), (50000, 768, 3072)])
def test_nothing_is_larger_than_a_tile(rows: int, width: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "LEAST_ROWS", 4096)

    def largest() -> int:
        shapes = (rows, width), (hidden, width), (width, hidden)
        x, up, down = (torch.empty(shape, device="meta").bfloat16() for shape in shapes)
        with _Largest() as made:
            ours.tiled_mlp_reference(x, [up, up], [], down, "silu", False)
            ours.tiled_mlp_backward_reference(x, x, [up, up], [], down, "silu", False)
        return made.elements

    assert largest() <= max((max(4096, width) + 128) * hidden, rows * width)
    monkeypatch.setattr(ours, "tile_rows", lambda rows, width: rows)
    assert largest() == rows * hidden, "whole hidden activations are seen"


@pytest.mark.parametrize(
    ("rows", "width", "tile"), [(131072, 4096, 4096), (131072, 8192, 8192), (5000, 512, 2560), (0, 8, 128), (1, 8, 128)]
)
def test_rows_of_a_tile(rows: int, width: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "LEAST_ROWS", 4096)
    assert ours.tile_rows(rows, width) == tile


def test_no_rows_have_gradients_of_zero() -> None:
    x, grad, weight, down = torch.randn(0, 4), torch.randn(0, 3), torch.randn(5, 4), torch.randn(3, 5)
    assert ours.tiled_mlp(x, [weight], [], down, "gelu", False).shape == (0, 3)
    found = ours.tiled_mlp_backward(grad, x, [weight], [torch.randn(5)], down, "gelu", False)
    for one, like in zip(found, (x, weight, weight[:, 0], down), strict=True):
        assert torch.equal(one, torch.zeros_like(like))


@pytest.mark.parametrize(("inputs", "biased"), [(2, False), (1, True)])
def test_fake_tensors_are_those_of_the_operators(inputs: int, biased: bool) -> None:
    grad, *rest = operands(torch.bfloat16, inputs, biased, True)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(ours.tiled_mlp, (*rest, "silu", True), test_utils=utils)
    torch.library.opcheck(ours.tiled_mlp_backward, (grad, *rest, "silu", True), test_utils=utils)

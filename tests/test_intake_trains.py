"""Unusual models and calls, compiled on one process: they train like the plain model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import autopar
from autopar.capture import captures as captures_module
from autopar.errors import ConfigurationError
from tests.capture.intake_forward import FORWARD
from tests.capture.intake_state import STATE, Autoencoder, RunningStatistics, Squared

X = torch.randn(4, 8)
ALL = {**STATE, **FORWARD}
TRAINED = (
    "running_statistics",
    "assigned_buffer",
    "logit_scale",
    "unused",
    "complex_filter",
    "weight_norm",
    "orthogonal",
    "own_gradient",
    "checkpoint",
    "accepts_nested",
    "accepts_dataclass",
    "returns_dataclass",
    "returns_namedtuple",
)


def loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    found: Tensor = output.loss if hasattr(output, "loss") else output[0]
    return found


def assert_trains_alike(module: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Loss, gradients (None where the plain model has none) and buffers of one step agree."""
    loss, expected = loss_of(module(*args, **kwargs)), loss_of(model(*args, **kwargs))
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    plain = dict(model.named_parameters())
    assert [name for name, _ in module.named_parameters()] == list(plain)
    for name, parameter in module.named_parameters():
        if plain[name].grad is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, plain[name].grad, rtol=1e-5, atol=1e-6)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer, model.get_buffer(name))


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("name", TRAINED)
def test_compiled_it_trains_like_the_plain_model(name: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = ALL[name]()
    plain = copy.deepcopy(model)
    names = list(inspect.signature(model.forward).parameters)
    example = {**dict(zip(names, args, strict=False)), **kwargs}
    module = autopar.compile(model, example)
    for _ in range(2):
        module.zero_grad()
        plain.zero_grad()
        assert_trains_alike(module, plain, (), example)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["torch.compile", "DataParallel"])
def test_wrappers_are_taken_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Squared(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    plain = copy.deepcopy(model)
    model.network[0] = wrap(model.network[0])
    wrapped = wrap(model)
    names = [name for name, _ in wrapped.named_parameters()]
    plan = autopar.plan(wrapped, (X,), cluster="2 H100-SXM")
    assert [name for name, _ in wrapped.named_parameters()] == names
    assert set(plan.parameters) == {name for name, _ in plain.named_parameters()}
    assert_trains_alike(autopar.compile(wrapped, (X,)), plain, (X,), {})


def test_autocast_around_the_call_counts() -> None:
    model = Squared(nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    module = autopar.compile(model, (X,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, expected = module(X), plain(X)
    torch.testing.assert_close(inside, expected, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(module(X), plain(X))
    assert not torch.equal(inside.float(), module(X))


def test_alternating_sizes_and_a_short_last_batch_capture_each_size_once() -> None:
    torch.manual_seed(0)
    model = Autoencoder()
    plain = copy.deepcopy(model)
    with mock.patch.object(captures_module, "capture", wraps=captures_module.capture) as traced:
        module = autopar.compile(model, (X,))
        before = dict(module.named_parameters())
        for size in (4, 3, 4, 3, 2, 4, 2):
            module.zero_grad()
            plain.zero_grad()
            assert_trains_alike(module, plain, (torch.randn(size, 8),), {})
    assert traced.call_count == 2  # sizes 4 and 3; size 2 is computed from them
    assert all(before[name] is parameter for name, parameter in module.named_parameters())


def test_a_python_scalar_that_changes_is_no_stale_constant() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return (self.linear(x) * scale).pow(2).mean()

    model = Scaled()
    plain = copy.deepcopy(model)
    module = autopar.compile(model, (X, 1.0))
    for scale in (1.0, 2.0, 3, 2.0):
        torch.testing.assert_close(module(X, scale), plain(X, scale))


def test_counters_keep_counting_over_sizes() -> None:
    model = RunningStatistics()
    module = autopar.compile(model, (X,))
    for _ in range(3):
        module(X)
    assert int(module.get_buffer("step")) == 3


def test_a_model_sharded_by_fsdp_is_refused() -> None:
    model = nn.Linear(8, 8)
    model.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    with pytest.raises(ConfigurationError, match="sharded by FSDP already"):
        autopar.compile(model, (X,))


class Statistics(nn.Module):
    """Operators whose local forms would exchange values between processes, the first inside a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Linear(8, 6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        largest = hidden.logsumexp(1, keepdim=True) + hidden.var(1, keepdim=True)
        return (hidden.cumsum(0).softmax(0) + largest).square().mean()


def test_one_process_exchanges_nothing() -> None:
    model = Statistics()
    module = autopar.compile(copy.deepcopy(model), example_inputs=(X,))
    assert_trains_alike(module, model, (X,), {})

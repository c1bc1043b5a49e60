"""What cannot be captured says where, and the smallest change that would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, fingerprint
from autopar.errors import CaptureError

HERE = r"test_failures\.py:\d+ \("


class Model(nn.Module):
    """`run(self, x)` is the forward."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.random_state: Any = None
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def branch(self: Any, x: Tensor) -> Any:
    if x.sum() > 0:
        return self.linear(x).mean()
    return self.linear(x).sum()


def loop(self: Any, x: Tensor) -> Any:
    x = self.linear(x)
    while x.norm() > 1:
        x = x / 2
    return x.mean()


def item(self: Any, x: Tensor) -> Any:
    return self.linear(x).mean() * x.max().item()


def listed(self: Any, x: Tensor) -> Any:
    return self.linear(x).mean() * x[0].tolist()[0]


def in_numpy(self: Any, x: Tensor) -> Any:
    return self.linear(x).mean() * float(np.mean(x.numpy()))


def asserted(self: Any, x: Tensor) -> Any:
    assert x.abs().max().item() < 100
    return self.linear(x).mean()


def checked(self: Any, x: Tensor) -> Any:
    assert x.abs().max() < 100, "too large"
    assert not torch.isnan(x).any().item()
    if x.max() > 100 or x.min() < -100:
        raise ValueError("out of range")
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    return self.linear(x).mean()


def chosen(self: Any, x: Tensor) -> Any:
    if x.max() > 100:
        raise ValueError("out of range")
    elif x.min() > 0:
        x = -x
    return self.linear(x).mean()


def raised_later(self: Any, x: Tensor) -> Any:
    if x.max() > 100:
        x = x / 2
        raise ValueError("out of range")
    return self.linear(x).mean()


def selected(self: Any, x: Tensor) -> Any:
    return self.linear(x)[x > 0].mean()


def conditional(self: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.linear(x),)).mean()


def nested(self: Any, x: Tensor) -> Any:
    parts = torch.nested.nested_tensor([self.linear(x)[:1], self.linear(x)[1:]])
    return parts.to_padded_tensor(0.0).mean()


def clamped_parameter(self: Any, x: Tensor) -> Any:
    self.linear.weight.data.clamp_(-0.1, 0.1)
    return self.linear(x).mean()


def backward_inside(self: Any, x: Tensor) -> Any:
    loss = self.linear(x).mean()
    loss.backward()
    return loss


class RunsForwardAgain(torch.autograd.Function):
    """A reversible network, as reformer-pytorch and linformer write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module, module.random_state = module, torch.get_rng_state()
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        torch.set_rng_state(ctx.module.random_state)
        return gradients[0] * 2, None


def reversible(self: Any, x: Tensor) -> Any:
    return RunsForwardAgain.apply(self.linear(x), self).mean()


def nothing(self: Any, x: Tensor) -> Any:
    return None


FAILURES = {
    branch: HERE + r"if x\.sum\(\) > 0:\).*torch\.where\(condition, a, b\) instead of if",
    loop: HERE + r"while x\.norm\(\) > 1:\).*fixed number of rounds",
    item: HERE + r".*instead of \.item\(\)",
    listed: HERE + r".*instead of \.tolist\(\)",
    in_numpy: HERE + r".*torch operators instead of numpy",
    asserted: HERE + r"assert .*leave the assertion out",
    selected: "shape depends on values .*" + HERE + r".*torch\.where\(mask, x, 0\)",
    conditional: r"torch\.cond keeps two graphs.*torch\.where",
    nested: HERE + ".*pad to one length",
    clamped_parameter: r"changes the parameter linear\.weight in place",
    backward_inside: HERE + r".*torch\.autograd\.grad",
    reversible: HERE + r"torch\.set_rng_state.*without reversible layers",
    nothing: "returns no tensor",
}


@pytest.mark.parametrize("run", FAILURES, ids=lambda run: run.__name__)
def test_the_message_says_where_and_what_helps(run: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=FAILURES[run]) as caught:
        capture(Model(run), (torch.randn(4, 8),))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_checks_that_only_raise_are_taken_to_pass() -> None:
    program = capture(Model(checked), (torch.randn(4, 8),))
    plain = capture(Model(lambda self, x: self.linear(x).mean()), (torch.randn(4, 8),))
    assert fingerprint(program) == fingerprint(plain)


@pytest.mark.parametrize("run", [chosen, raised_later])
def test_a_choice_is_no_check(run: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=HERE + r"if x\.max\(\) > 100:\)"):
        capture(Model(run), (torch.randn(4, 8),))


def test_cumulative_batch_norm_names_torchs_line_and_the_momentum() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    with pytest.raises(
        CaptureError, match=r"inside torch/nn/modules/batchnorm\.py:\d+ .*give the batch norm a momentum"
    ):
        capture(Model(lambda self, x: network(x)), (torch.randn(4, 8),))


class Opaque:
    """An object with a tensor that pytrees do not know."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (torch.empty(0, 8), r"input args\.0 has shape \(0, 8\), which holds no element"),
        (torch.eye(8).to_sparse(), r"args\.0 is a sparse tensor .*to_dense"),
        (torch.quantize_per_tensor(torch.ones(4, 8), 0.1, 0, torch.qint8), r"args\.0 is quantised"),
        (torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)]), r"args\.0 is a nested tensor"),
        (Opaque(torch.ones(4, 8)), r"the arguments\[0\]\[0\] is a Opaque that holds tensors"),
    ],
    ids=["empty", "sparse", "quantised", "nested", "opaque"],
)
def test_inputs_that_no_graph_takes_are_named(argument: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(Model(lambda self, x: self.linear(x).mean()), (argument,))


class Likelihood(nn.Module):
    """Checks of a distribution's parameters only raise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.layer(x).unbind(-1)
        return -torch.distributions.Normal(mean, nn.functional.softplus(scale)).log_prob(x[:, 0]).mean()


def test_distributions_are_captured_without_their_checks() -> None:
    checks = torch.distributions.Distribution._validate_args
    program = capture(Likelihood(), (torch.randn(3, 4),))
    assert program.training
    assert torch.distributions.Distribution._validate_args is checks  # the switch is restored

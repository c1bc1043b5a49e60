"""Models whose forward does unusual things: in-place updates, checkpoints, autocast, hooks, own gradients."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.capture.intake_state import Squared, on_x
from tests.capture.small_models import Case


class InPlace(nn.Module):
    """relu_, +=, index assignment, masked_fill_, a preallocated buffer that is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = functional.relu_(hidden * 1) * 2
        hidden += x
        hidden[:, 0] = hidden[:, 1] * 2
        hidden[1:3, ::2] *= 0.5
        filled = torch.zeros(4, 16)
        filled[:, :8] = self.second(hidden)
        filled[:, 8:].copy_(hidden)
        return filled.masked_fill_(x.repeat(1, 2) > 1, 0.0).pow(2).mean()


class Checkpointed(nn.Module):
    """Two blocks, each in a checkpoint region."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(8, 8)  # reentrant regions need an input that requires a gradient
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.pow(2).mean()


class Autocast(nn.Module):
    """bf16 inside, with an fp32 island."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(x).relu()
            with torch.autocast("cpu", enabled=False):
                hidden = hidden.float().softmax(-1)
            hidden = self.second(hidden)
        return hidden.float().pow(2).mean()


class StraightThrough(torch.autograd.Function):
    """round() whose gradient is that of 3 x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 + 0 * x


class OwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rounded: Tensor = StraightThrough.apply(self.linear(x) * 5)
        return rounded.pow(2).mean()


class InnerGradient(nn.Module):
    """The forward computes a gradient itself (forces from an energy)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.linear(x).tanh().pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.pow(2).mean()


class DetachedTarget(nn.Module):
    """A stop gradient and torch.no_grad inside."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.target(x)
        return functional.mse_loss(self.online(x), wanted) + self.online(x).detach().mean()


def forward_hooks() -> Case:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    network[0].register_forward_hook(lambda module, args, output: output * 2)
    network[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return on_x(Squared(network))


def tensor_hook() -> Case:
    return on_x(TensorHook())


class TensorHook(nn.Module):
    """A hook on an activation that clamps its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return hidden.pow(2).mean()


def full_backward_hook() -> Case:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    network[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return on_x(Squared(network))


def sparse_embedding() -> Case:
    model = Squared(nn.Embedding(16, 4, sparse=True))
    return model, (torch.randint(0, 16, (4, 3)),), {}


def embedding_bag() -> Case:
    return Squared(nn.EmbeddingBag(16, 4)), (torch.randint(0, 16, (4, 3)),), {}


def lstm() -> Case:
    return Recurrent(), (torch.randn(4, 5, 8),), {}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        return out.pow(2).mean()


class NamedScores(namedtuple("NamedScores", ["loss", "scores"])):
    """A named tuple as output."""


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Result:
    """A dataclass that nobody registered with torch's pytrees."""

    loss: Tensor
    scores: Tensor
    parts: list[Tensor]
    name: str = "result"
    missing: Tensor | None = None


class Returns(nn.Module):
    """Returns what `build` makes of the scores."""

    def __init__(self, build: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.build = build

    def forward(self, x: Tensor) -> Any:
        return self.build(self.linear(x))


def nested(scores: Tensor) -> dict[str, Any]:
    return {"a": [scores, None, {"b": (scores * 2, 3)}], "c": "text", "d": None}


class Accepts(nn.Module):
    """Nested inputs, defaults, constants, None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self,
        data: dict[str, Any],
        extra: list[Tensor] | None = None,
        *,
        scale: float = 2.0,
        kind: str = "relu",
        repeat: int = 1,
        mask: Tensor | None = None,
    ) -> Tensor:
        hidden = self.linear(data["x"]["values"][0]) * scale
        for _ in range(repeat):
            hidden = getattr(torch, kind)(hidden)
        for term in extra or []:
            hidden = hidden + term
        if mask is not None:
            hidden = hidden.masked_fill(mask, 0.0)
        return hidden.pow(2).mean()


@dataclasses.dataclass
class Request:
    """A dataclass as argument."""

    x: Tensor
    y: Tensor
    weight: float = 0.5


class TakesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, request: Request) -> Tensor:
        return functional.mse_loss(self.linear(request.x), request.y) * request.weight


class IntegerInputs(nn.Module):
    """Indices of several integer dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (self.embedding(a) + self.embedding(b.long()) * c[..., None]).pow(2).mean()


class Cond(nn.Module):
    """torch.where in place of a branch, einsum, cumsum, topk, unfold, chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden = torch.where(hidden.sum() > 0, hidden, -hidden)
        first, second = torch.einsum("bi,bj->bij", hidden, hidden).chunk(2, dim=1)
        values, _ = first.flatten(1).topk(3)
        return values.cumsum(1).mean() + second.unfold(2, 3, 2).mean()


FORWARD: dict[str, Callable[[], Case]] = {
    "in_place": lambda: on_x(InPlace()),
    "checkpoint_reentrant": lambda: on_x(Checkpointed(True)),
    "checkpoint": lambda: on_x(Checkpointed(False)),
    "autocast_inside": lambda: on_x(Autocast()),
    "own_gradient": lambda: on_x(OwnGradient()),
    "inner_gradient": lambda: on_x(InnerGradient()),
    "detached_target": lambda: on_x(DetachedTarget()),
    "forward_hooks": forward_hooks,
    "tensor_hook": tensor_hook,
    "full_backward_hook": full_backward_hook,
    "sparse_embedding": sparse_embedding,
    "embedding_bag": embedding_bag,
    "lstm": lstm,
    "returns_namedtuple": lambda: on_x(Returns(lambda scores: Pair(scores.pow(2).mean(), scores))),
    "returns_dataclass": lambda: on_x(Returns(lambda s: Result(s.pow(2).mean(), s, [s + 1, s * 2]))),
    "returns_nested": lambda: on_x(Returns(nested)),
    "returns_list": lambda: on_x(Returns(lambda scores: [scores, scores.sum(0), None])),
    "returns_input_twice": lambda: on_x(Returns(lambda scores: (scores, scores, scores[0]))),
    "returns_integer": lambda: on_x(Returns(lambda scores: (scores, scores.argmax(-1)))),
    "accepts_nested": lambda: (
        Accepts(),
        ({"x": {"values": [torch.randn(4, 8)]}},),
        {"extra": [torch.ones(4, 8), torch.ones(8)], "kind": "tanh", "repeat": 2, "mask": torch.rand(4, 8) > 0.5},
    ),
    "accepts_none": lambda: (Accepts(), ({"x": {"values": [torch.randn(4, 8)]}}, None), {"mask": None}),
    "accepts_dataclass": lambda: (TakesDataclass(), (Request(torch.randn(4, 8), torch.randn(4, 8)),), {}),
    "integer_inputs": lambda: (
        IntegerInputs(),
        (
            torch.randint(0, 16, (4, 3), dtype=torch.int32),
            torch.randint(0, 16, (4, 3), dtype=torch.int16),
            torch.randint(0, 3, (4, 3), dtype=torch.uint8),
        ),
        {},
    ),
    "where_and_friends": lambda: on_x(Cond()),
    "input_gradient": lambda: (Squared(nn.Linear(8, 8)), (torch.randn(4, 8, requires_grad=True),), {}),
}

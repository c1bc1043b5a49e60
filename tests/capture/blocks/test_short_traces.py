"""Captures by blocks are whole captures, and what is not provably equal is traced whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.capture.blocks import short_traces
from autopar.capture.blocks.short_traces import whole_traces
from autopar.errors import CaptureError
from benchmarks.same_programs import capture_reasons, difference

WIDTH, DEPTH = 8, 6


class Block(nn.Module):
    """Attention and a multilayer perceptron, with dropout, a buffer, a constant and an index that nobody reads."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.power = 2.0

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
        found = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(-2)
        found = self.out(found) * self.scale + bias * torch.tensor([0.5]) + (x**self.power).mean()
        return x + self.dropout(found) + torch.rand_like(x)


class Plain(nn.Module):
    """A block of few operators."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.power = index, 2.0
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.out(self.norm(x) + bias) ** self.power


class Stack(nn.Module):
    """Blocks in a row between an embedding and a head."""

    def __init__(self, block: Callable[[int], nn.Module] = Plain) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(block(index) for index in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x, bias = nn.functional.dropout(self.embed(x)), self.bias.exp()
        for layer in self.layers:
            x = self.step(layer, x, bias)
        return (self.head(nn.functional.dropout(x)) + torch.rand_like(x)).square().mean()

    def step(self, layer: nn.Module, x: Tensor, bias: Tensor) -> Any:
        return layer(x, bias)


class Glued(Stack):
    def step(self, layer: nn.Module, x: Tensor, bias: Tensor) -> Any:
        return layer(x * 0.5, bias) + x


class Checkpointed(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def step(self, layer: nn.Module, x: Tensor, bias: Tensor) -> Any:
        return checkpoint(layer, x, bias, use_reentrant=False)


class FirstMakesBias(Stack):
    """The first block computes what all others take, as in T5."""

    class Block(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            bias = x.softmax(-1) if bias is None else bias
            return self.linear(x) + bias, bias

    def __init__(self) -> None:
        super().__init__(FirstMakesBias.Block)

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.embed(x), None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return self.head(x).sum()


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        block = lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())  # noqa: E731
        super().__init__(nn.Conv1d(3, 4, 1), *(block() for _ in range(DEPTH)), nn.Flatten(), nn.Linear(4 * WIDTH, 1))


EQUAL: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "blocks": (lambda: Stack(Block), {}),
    "bf16": (lambda: Stack(Block), {"precision": "bf16", "reduce_dtype": "bf16"}),
    "no backward": (lambda: Stack(Block), {"training": False}),
    "glue between the blocks": (Glued, {}),
    "checkpointed": (Checkpointed, {}),
    "the first makes what all take": (FirstMakesBias, {}),
    "convolutions": (Convolutions, {}),
}


def inputs_of(model: nn.Module, batch: int = 4) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, WIDTH) if isinstance(model, Convolutions) else torch.randn(batch, 5, WIDTH),)


def both(model: nn.Module, batch: int = 4, **options: Any) -> tuple[str | None, list[str]]:
    """Where the capture differs from the whole one, and what it said of its way."""
    options = {"loss_fn": lambda output, _: output.sum(), "training": True, **options}
    with whole_traces():
        whole = capture(model, inputs_of(model, batch), **options)
    with capture_reasons() as reasons:
        program = capture(model, inputs_of(model, batch), **options)
    return difference(program, whole), reasons


@pytest.mark.parametrize("name", EQUAL)
def test_a_capture_by_blocks_is_the_whole_capture(name: str) -> None:
    make, options = EQUAL[name]
    differs, reasons = both(make(), **options)
    assert differs is None
    assert "4 of 6 equal modules are traced" in reasons[0]


def test_another_batch_is_captured_by_blocks_too() -> None:
    model = Stack()
    for batch in (4, 6):
        differs, reasons = both(model, batch)
        assert differs is None
        assert "4 of 6" in reasons[0]


# what is traced whole


class ByIndex(Plain):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        found = super().forward(x, bias)
        return found.relu() if self.index == 4 else found


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x, self.bias)
        return x.sum()


class Skips(Stack):
    """The last blocks take what the first gave."""

    def forward(self, x: Tensor) -> Tensor:
        held = []
        for layer in self.layers[: DEPTH // 2]:
            x = layer(x, self.bias)
            held.append(x)
        for layer in self.layers[DEPTH // 2 :]:
            x = layer(x, self.bias) + held.pop()
        return x.sum()


class ThirdAgain(Stack):
    """What the third gave, not what the last but one gave, comes again."""

    def forward(self, x: Tensor) -> Tensor:
        held = []
        for layer in self.layers:
            x = layer(x, self.bias)
            held.append(x)
        return (x + held[2]).sum()


class Scaled(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.bias) / len(self.layers)
        return x.sum()


class OtherArgument(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, self.bias if index != 4 else self.bias * 2)
        return x.sum()


class OnlySome(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:4]:
            x = layer(x, self.bias)
        return x.sum()


class AllOutputs(Stack):
    def forward(self, x: Tensor) -> Any:
        held = []
        for layer in self.layers:
            x = layer(x, self.bias)
            held.append(x)
        return {"loss": x.sum(), "held": held}


class Keeps(Plain):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        self.index += 1
        return super().forward(x, bias)


def _changed(change: Callable[[nn.ModuleList], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Stack()
        change(model.layers)
        return model

    return make


def _set(layer: Any, name: str, value: object) -> None:
    setattr(layer, name, value)


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "an index that is read": lambda: Stack(ByIndex),
    "another number": _changed(lambda layers: _set(layers[4], "power", 3.0)),
    "another width": _changed(lambda layers: _set(layers[4], "out", nn.Linear(WIDTH, WIDTH, bias=False))),
    "another mode": _changed(lambda layers: layers[4].eval()),
    "a frozen weight": _changed(lambda layers: layers[4].out.requires_grad_(False)),
    "tied weights": _changed(lambda layers: _set(layers[4].out, "weight", layers[2].out.weight)),
    "a shared module": _changed(lambda layers: _set(layers[4], "norm", layers[2].norm)),
    "a hook": _changed(lambda layers: layers[4].register_forward_hook(lambda m, args, out: out * 2)),
    "a forward of its own": _changed(lambda layers: _set(layers[4], "forward", lambda x, bias: x + bias)),
    "all blocks twice, with draws": lambda: Twice(Block),
    "skips": Skips,
    "the third again": ThirdAgain,
    "scaled by the depth": Scaled,
    "another argument": OtherArgument,
    "only some": OnlySome,
    "all outputs": AllOutputs,
    "state": lambda: Stack(Keeps),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_proven_is_traced_whole(name: str) -> None:
    options: dict[str, Any] = {} if name == "all outputs" else {"loss_fn": lambda output, _: output.sum()}
    with capture_reasons() as reasons:
        capture(model := WHOLE[name](), inputs_of(model), **options)
    assert not any("are traced" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("an index that is read", "read_alike"),
        ("the third again", "_check_outlines"),
        ("another argument", "_check_outlines"),
    ],
)
def test_without_its_check_a_capture_would_be_wrong(name: str, check: str) -> None:
    with mock.patch.object(short_traces, check, return_value=None):
        differs, reasons = both(WHOLE[name]())
    assert differs is not None
    assert "are traced" in reasons[-1]


def test_the_model_is_left_as_it_was() -> None:
    model = Stack()
    before = {path: (list(vars(module)), list(module._modules)) for path, module in model.named_modules()}
    tensors = copy.copy(model.state_dict(keep_vars=True))
    both(model)
    model.head.forward = lambda x: x + torch.zeros(3)  # a shape that does not fit
    with pytest.raises(CaptureError):
        capture(model, inputs_of(model), loss_fn=lambda output, _: output.sum())
    del model.head.forward
    assert {path: (list(vars(module)), list(module._modules)) for path, module in model.named_modules()} == before
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    assert all(after[name] is tensors[name] for name in tensors)


def test_warnings_come_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(Keeps)
    capture(model, inputs_of(model), loss_fn=lambda output, _: output.sum())
    texts = [record.getMessage() for record in caplog.records if "layers.0.index" in record.getMessage()]
    assert len(texts) == 1


SEEN: list[int] = []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(len(SEEN))
        return torch.tanh(self.inner(x))


def test_what_members_change_outside_of_them_is_put_back() -> None:
    capture(nn.Sequential(*(Counting() for _ in range(DEPTH))), (torch.ones(4, 8),), {}, training=False)
    assert not SEEN

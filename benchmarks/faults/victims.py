"""What faults are made around: small models, their batches, and the question whether a compiled one is right.

    module = compiled(scene, Net(), batch())           # as the layout of the scene asks
    expect_step(module, plain, batch())                # loss and gradients of the plain model, or Wrong

A step is right by the criterion of `benchmarks.agreement`; weights behind several steps of SGD by 1e-5 of their norm.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autopar
from autopar.cli import main
from benchmarks.agreement import TOLERANCE, Reference, reference
from benchmarks.faults.fault import RefusedByCommand, Scene, Wrong

WIDTH, CLASSES, SIZE = 8, 4, 8
Batch = dict[str, Tensor]


class Net(nn.Module):
    """Blocks of equal width and a head. forward(x (B, 8), labels (B,)) -> loss.

    What subclasses say in `between` stands behind every block: numbers, hooks and drops that Python holds."""

    def __init__(self, layers: int = 2, width: int = WIDTH, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def scores(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.between(torch.tanh(block(x)))
        scores: Tensor = self.head(x)
        return scores

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.scores(x), labels)


class Scored(Net):
    """forward -> {"loss", "logits"}."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.scores(x)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


class Bare(Net):
    """forward(x) -> scores; the loss is somebody else's."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.scores(x)


class Normalised(Net):
    """A batch norm behind every block: running means are buffers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, hidden: Tensor) -> Tensor:
        normalised: Tensor = self.norm(hidden)
        return normalised


def batch(seed: int = 0, size: int = SIZE, width: int = WIDTH) -> Batch:
    """Samples and labels."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, width, generator=draw),
        "labels": torch.randint(0, CLASSES, (size,), generator=draw),
    }


def compiled(scene: Scene, model: nn.Module, inputs: Any, **options: Any) -> Any:
    """`autopar.compile` for the layout of the scene: a module whose attributes are those of the model."""
    return autopar.compile(model, inputs, **{"mode": "fast", "dims": scene.dims, **options})


def backward(loss: Tensor, **options: Any) -> None:
    """`loss.backward()`, which torch leaves without types."""
    loss.backward(**options)  # type: ignore[no-untyped-call]


def loss_of(output: Any) -> Tensor:
    """The output itself, or its "loss"."""
    loss = output["loss"] if isinstance(output, dict) else output
    assert isinstance(loss, Tensor)
    return loss


class _LossOnly(nn.Module):
    """A model whose outputs beside the loss are left out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Tensor) -> Tensor:
        return loss_of(self.inner(**inputs))


def expected_step(plain: nn.Module, inputs: Batch) -> Reference:
    """Loss and gradients of the plain model, and how far from them a right one may be."""
    found = reference(_LossOnly(plain), inputs)
    return Reference(
        found.loss,
        {name.removeprefix("inner."): gradient for name, gradient in found.gradients.items()},
        {name.removeprefix("inner."): allowed for name, allowed in found.allowed.items()},
        {name.removeprefix("inner."): scale for name, scale in found.scales.items()},
    )


def expect_step(module: nn.Module, plain: nn.Module, inputs: Batch, given: Batch | None = None) -> None:
    """One step of both from zero gradients. given: what this rank passes, where that is not `inputs`.

    Raises Wrong with the loss or the gradient that is another one."""
    expected = expected_step(plain, inputs)
    module.zero_grad()
    loss = loss_of(module(**(given or inputs)))
    backward(loss)
    expect_value("the loss", loss, expected.loss, expected.allowed[""])
    expect_gradients(module, expected)


def expect_gradients(module: nn.Module, expected: Reference) -> None:
    """Gradients of the parameters that this rank holds. Raises Wrong."""
    for name, parameter in module.named_parameters():
        wanted = expected.gradients.get(name)
        if parameter.grad is None or wanted is None:
            if wanted is not None and wanted.any():
                raise Wrong(f"{name} has no gradient")
            continue
        error = float((whole(parameter.grad).double() - wanted.double()).norm()) / expected.scales[name]
        if not error <= expected.allowed[name]:
            raise Wrong(f"the gradient of {name} is {error:.1%} off")


def expect_value(what: str, value: Tensor, wanted: Tensor, allowed: float = TOLERANCE) -> None:
    """Raises Wrong where the two differ by more than a part of the norm; equal non-finite numbers are equal."""
    value, wanted = whole(value).detach().double(), whole(wanted).detach().double()
    if value.shape != wanted.shape:
        raise Wrong(f"{what} has shape {tuple(value.shape)} instead of {tuple(wanted.shape)}")
    finite = wanted.isfinite()
    if not torch.equal(value.isfinite(), finite):
        raise Wrong(f"{what} is {value.flatten()[:3].tolist()} instead of {wanted.flatten()[:3].tolist()}")
    error = float((value[finite] - wanted[finite]).norm()) / max(float(wanted[finite].norm()), 1e-30)
    if not error <= allowed:
        numbers = f": {float(value):.4g} instead of {float(wanted):.4g}" if value.dim() == 0 else ""
        raise Wrong(f"{what} is {error:.1%} off{numbers}")


def expect_weights(module: nn.Module, plain: nn.Module, allowed: float = TOLERANCE) -> None:
    """Parameters and buffers that this rank holds are those of the plain model. Raises Wrong."""
    wanted = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        expect_value(name, value, wanted[name], allowed)


def whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered, other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch],
    between: Callable[[int], object] = lambda step: None,
) -> None:  # fmt: skip
    """Steps over these batches; `between(step)` is called before each."""
    for step, inputs in enumerate(batches):
        between(step)
        optimizer.zero_grad()
        backward(loss_of(model(**inputs)))
        optimizer.step()


def expect_training(
    module: nn.Module, plain: nn.Module, make: Callable[[Any], torch.optim.Optimizer], steps: int = 3,
    allowed: float = TOLERANCE,
) -> None:  # fmt: skip
    """Train both alike; their weights must stay the same. Raises Wrong."""
    batches = [batch(seed) for seed in range(steps)]
    train(module, make(module.parameters()), batches)
    train(plain, make(plain.parameters()), batches)
    expect_weights(module, plain, allowed)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer whose steps do not amplify rounding."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def twin(model: nn.Module) -> Any:
    """A copy that stays plain."""
    return copy.deepcopy(model)


def command(*words: str | Path) -> str:
    """What `autopar WORDS` prints. Raises RefusedByCommand where it ends with one of its exit codes and a message,
    Wrong where it prints a traceback."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    if "Traceback" in err.getvalue():
        raise RuntimeError(err.getvalue().strip().splitlines()[-1])
    if code:
        raise RefusedByCommand(err.getvalue().strip())
    return out.getvalue()


def factory(batch: int, seq: int) -> tuple[nn.Module, Batch]:
    """A model that the command line can name; it has no sequence."""
    return Net(), {"x": torch.zeros(batch, WIDTH), "labels": torch.zeros(batch, dtype=torch.long)}


MODEL = f"{__name__}:factory"
ON = ("--cluster", "2x4 H100-SXM", "--batch", "8", "--mode", "fast", "--dims", "dp_shard=8")


@functools.cache
def sound_plan() -> bytes:
    """A plan file of the small model for 8 devices, as `autopar plan` writes it."""
    here = Path(f"sound-{os.getpid()}.json")
    try:
        command("plan", MODEL, *ON, "-o", here)
        return here.read_bytes()
    finally:
        here.unlink(missing_ok=True)


@functools.cache
def sound_pipeline() -> bytes:
    """A plan with two stages for two processes."""
    found = autopar.plan(Net(), batch(), cluster="2 cpu", dims={"pp": 2}, mode="fast")
    return found.to_json()


@functools.cache
def warmed() -> bool:
    """In a template: import by use what every fault needs, and make the plans; whether that was done now."""
    model = Scored()
    module = autopar.compile(model, batch(), mode="fast")
    backward(module(**batch())["loss"])
    for dims in ({"tp": 2}, {"dp_shard": 2, "tp": 2}):
        autopar.plan(Net(), batch(), cluster=f"{2 * len(dims)} cpu", dims=dims, mode="fast")
    return bool(sound_plan() and sound_pipeline())

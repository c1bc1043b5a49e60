"""Point 17, its other half: values, sizes and models at the edge, which must come out as the plain model says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.fault import Fault, Scene, fault, make_fault
from benchmarks.faults.victims import (
    Bare,
    Batch,
    Net,
    Scored,
    backward,
    batch,
    compiled,
    expect_step,
    expect_value,
    loss_of,
)


def _values(change: Callable[[Batch], object], scene: Scene) -> None:
    module, inputs = compiled(scene, Scored(), batch()), batch()
    change(inputs)
    plain = Scored()
    for model in (module, plain):
        backward(loss_of(model(**inputs)))
    expect_value("the loss", loss_of(module(**inputs)), loss_of(plain(**inputs)))
    wanted = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        expect_value(f"the gradient of {name}", parameter.grad, wanted[name].grad)  # type: ignore[arg-type]


ODD_VALUES: Mapping[str, Callable[[Batch], object]] = {
    "NaN in a sample": lambda inputs: inputs["x"][3].fill_(float("nan")),
    "infinity in a sample": lambda inputs: inputs["x"][3, 2].fill_(float("inf")),
    "huge numbers": lambda inputs: inputs["x"].mul_(1e30),
    "labels that are ignored": lambda inputs: inputs["labels"][:3].fill_(-100),
    "all labels ignored": lambda inputs: inputs["labels"].fill_(-100),
}

VALUES: tuple[Fault, ...] = tuple(
    make_fault(17, name.replace(" ", "_"), f"the batch holds {name}: as the plain model", partial(_values, change),
               layout=layout, right=True)
    for name, change in ODD_VALUES.items()
    for layout in ("alone", "dp2", "tp2", "pp2")
)  # fmt: skip


@fault(17, "a label beyond the classes", on=("alone", "dp2"), words=("label|target|index|class|bounds",), as_torch=True)
def label_beyond(scene: Scene) -> None:
    module, inputs = compiled(scene, Net(), batch()), batch()
    inputs["labels"][2] = 99
    try:
        backward(loss_of(module(**inputs)))
    except IndexError as error:
        raise RuntimeError(str(error)) from error


def _sizes(size: int, scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    expect_step(module, Net(), batch())
    inputs = batch(size=size)
    if size:
        expect_step(module, Net(), inputs)
        return
    expect_value("the loss", loss_of(module(**inputs)), loss_of(Net()(**inputs)))


SIZES: tuple[Fault, ...] = tuple(
    make_fault(17, f"{size} samples".replace(" ", "_"), f"a later batch has {size} samples", partial(_sizes, size),
               layout=layout, right=True, words=("batch|sample|sizes|divide",))
    for size in (0, 1, 3, 7)
    for layout in ("alone", "dp2", "shard4", "tp2", "pp2")
    if layout != "alone" or size == 0
)  # fmt: skip


@fault(17, "the first batch is empty", right=True, words=("batch|empty|sample",))
def empty_first(scene: Scene) -> None:
    compiled(scene, Net(), batch(size=0))


class NoParameters(nn.Module):
    """Nothing to train."""

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


ODD_MODELS: Mapping[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...]]] = {
    "no parameters": (NoParameters, {"x": batch()["x"]}, ("parameter|gradient",)),
    "all parameters frozen": (lambda: Bare().requires_grad_(False), {"x": batch()["x"]}, ("parameter|gradient",)),
    "parameters not made yet": (lambda: nn.LazyLinear(4), (batch()["x"],), ("Lazy|lazy",)),
    "parameters on meta": (lambda: Net().to("meta"), batch(), ("meta",)),
    "scripted": (lambda: torch.jit.script(nn.Linear(8, 4)), (batch()["x"],), ("script|Script",)),
    "complex weights": (
        lambda: nn.Linear(8, 4, dtype=torch.complex64),
        (batch()["x"].to(torch.complex64),),
        ("complex",),
    ),
}


def _odd_model(make: Callable[[], nn.Module], inputs: Any, scene: Scene) -> None:
    module = compiled(scene, make(), inputs)
    module(**inputs) if isinstance(inputs, dict) else module(*inputs)


MODELS: tuple[Fault, ...] = tuple(
    make_fault(17, name.replace(" ", "_"), f"a model with {name}", partial(_odd_model, make, inputs), right=True,
               words=words)
    for name, (make, inputs, words) in ODD_MODELS.items()
)  # fmt: skip


class Named(nn.Module):
    """A submodule whose name is a method of ours."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(8, 4))
        self._name = name

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(getattr(self, self._name)(x), labels)


NAMES: tuple[Fault, ...] = tuple(
    make_fault(17, f"submodule named {name}".replace(" ", "_"), f"a submodule is named {name}, as a method of ours",
               partial(lambda name, scene: _odd_model(partial(Named, name), batch(), scene), name), right=True,
               words=(name,))
    for name in ("plan", "mesh", "device", "gather", "calls", "seed", "loss_fn", "precision", "original")
)  # fmt: skip

"""Points 5 and 6: optimizers that hold other parameters, and Python state that changes behind the compiled graph.

Each change of state is made alike on the plain model; the compiled one must follow it, or refuse and name it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults.fault import Fault, Scene, fault, make_fault
from benchmarks.faults.victims import (
    Bare,
    Net,
    Normalised,
    backward,
    batch,
    compiled,
    expect_step,
    expect_training,
    expect_value,
    expect_weights,
    sgd,
    train,
    twin,
)

OLD = ("optimizer=|compile",)


@fault(5, "an optimizer made before compile is not handed over", on=("alone", "dp2", "pp2"), words=OLD)
def optimizer_before(scene: Scene) -> None:
    model = Net()
    optimizer = sgd(model.parameters())
    train(compiled(scene, model, batch()), optimizer, [batch()])


@fault(5, "the same with a learning rate schedule", words=OLD)
def scheduled_before(scene: Scene) -> None:
    model = Net()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(compiled(scene, model, batch()), optimizer, [batch(), batch(1)], lambda step: schedule.step())


@fault(5, "an optimizer made before compile steps by GradScaler", words=OLD)
def scaled_before(scene: Scene) -> None:
    model = Net()
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu")
    module = compiled(scene, model, batch())
    backward(scaler.scale(module(**batch())))
    scaler.step(optimizer)


@fault(5, "an optimizer made before compile holds half of the parameters", words=OLD)
def half_before(scene: Scene) -> None:
    model = Net()
    head = sgd(model.head.parameters())
    train(compiled(scene, model, batch()), head, [batch()])


@fault(5, "an optimizer that was made before is handed over", on=("alone", "dp2", "shard4"), right=True)
def handed_over(scene: Scene) -> None:
    model, plain = Net(), Net()
    optimizer = sgd(model.parameters())
    module = compiled(scene, model, batch(), optimizer=optimizer)
    expect_training(module, plain, lambda parameters: _of(optimizer, parameters))


def _of(optimizer: torch.optim.Optimizer, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer handed over where it holds these parameters, else a new one for the plain model."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    given = list(parameters)
    return optimizer if all(id(parameter) in held for parameter in given) else sgd(given)


@fault(5, "an optimizer that has stepped is handed over", on=("alone", "shard2"), right=True, words=("optimizer",))
def stepped_and_handed_over(scene: Scene) -> None:
    model, plain = Net(), Net()
    optimizer, plain_optimizer = sgd(model.parameters()), sgd(plain.parameters())
    train(model, optimizer, [batch(7)])
    train(plain, plain_optimizer, [batch(7), batch(1), batch(2)])
    module = compiled(scene, model, batch(), optimizer=optimizer)
    train(module, optimizer, [batch(1), batch(2)])
    expect_weights(module, plain)


class Scaled(Net):
    """Everything that Python may hold: numbers, lists, dictionaries, tables, counters and settings."""

    share = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0
        self.scales = [1.0, 1.0]
        self.options = {"scale": 1.0}
        self.config = type("Config", (), {})()
        self.config.scale = 1.0
        self.flag = False
        self.table = torch.ones(8)
        self.calls = 0
        self.part = Factor()
        self.function: Callable[[Tensor], Tensor] = torch.tanh

    def between(self, hidden: Tensor) -> Tensor:
        hidden = hidden * self.alpha * self.scales[0] * self.options["scale"] * self.config.scale * self.share
        hidden = self.function(self.part(hidden)) * self.table * GLOBALS["scale"]
        return -hidden if self.flag else hidden


class Factor(nn.Module):
    """A number of a submodule."""

    factor = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.factor


GLOBALS = {"scale": 1.0}


def _part_factor(model: Any) -> None:
    model.part.factor = 2.0


def _item(model: Any) -> None:
    model.scales[0] = 2.0


def _entry(model: Any) -> None:
    model.options["scale"] = 2.0


def _config(model: Any) -> None:
    model.config.scale = 2.0


def _of_class(model: Any) -> None:
    type(model).share = 2.0


def _of_module(model: Any) -> None:
    GLOBALS["scale"] = 2.0


def _table(model: Any) -> None:
    model.table.mul_(2.0)


def _function(model: Any) -> None:
    model.function = torch.sigmoid


def _closure(factor: float) -> Callable[[Tensor], Tensor]:
    held = [factor]

    def scaled(hidden: Tensor) -> Tensor:
        return torch.tanh(hidden) * held[0]

    scaled.held = held  # type: ignore[attr-defined]
    return scaled


def _method(model: Any) -> None:
    model.between = lambda hidden: hidden * 3.0


CHANGES: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "a number of the model": (lambda model: setattr(model, "alpha", 2.0), "alpha"),
    "a flag of the model": (lambda model: setattr(model, "flag", True), "flag"),
    "a number of a submodule": (_part_factor, "factor"),
    "an item of a list": (_item, "scales"),
    "an entry of a dictionary": (_entry, "options|scale"),
    "a setting of a configuration": (_config, "config|scale"),
    "a number of the class": (_of_class, "share"),
    "a global of the module": (_of_module, "GLOBALS|scale"),
    "values of a tensor that is no buffer": (_table, "table"),
    "a function of the model": (_function, "function"),
    "a method of the model": (_method, "between"),
}


SHARED = (_of_class, _of_module)
"""Changes that the plain model sees too."""


def _changed_after(change: Callable[[Any], object], scene: Scene) -> None:
    model, plain = Scaled(), Scaled()
    module = compiled(scene, model, batch())
    expect_step(module, plain, batch())
    change(model)
    if change not in SHARED:
        change(plain)
    expect_step(module, plain, batch())


CHANGED_STATE: tuple[Fault, ...] = tuple(
    make_fault(6, name.replace(" ", "_"), f"{name} changes behind compile", partial(_changed_after, change),
               layout=layout, right=True, words=words)
    for layout in ("alone", "dp2")
    for name, (change, words) in CHANGES.items()
    if layout == "alone" or name in ("a number of the model", "a global of the module")
)  # fmt: skip


@fault(6, "a number is set on the compiled module", on=("alone", "dp2"), right=True, words=("alpha",))
def number_on_compiled(scene: Scene) -> None:
    module, plain = compiled(scene, Scaled(), batch()), Scaled()
    module.alpha = plain.alpha = 2.0
    expect_step(module, plain, batch())


@fault(6, "a number of the model changes on rank 1 only", on=("dp2", "tp2"), words=("rank[s]? .*1",))
def number_on_one(scene: Scene) -> None:
    module = compiled(scene, Scaled(), batch())
    module.original.alpha = 1.0 + scene.rank
    for _ in range(3):
        backward(module(**batch()))


@fault(6, "the closure of a function that the model calls changes", right=True, words=("function|closure|held",))
def closure(scene: Scene) -> None:
    model, plain = Scaled(), Scaled()
    model.function, plain.function = _closure(1.0), _closure(1.0)
    module = compiled(scene, model, batch())
    for each in (model.function, plain.function):
        each.held[0] = 2.0  # type: ignore[attr-defined]
    expect_step(module, plain, batch())


class Dropped(Net):
    """forward drops half behind every block."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, hidden: Tensor) -> Tensor:
        dropped: Tensor = self.drop(hidden)
        return dropped


@fault(6, "Dropout.p becomes 0 behind compile", on=("alone", "dp2"), right=True, words=(r"\bp\b",))
def dropout(scene: Scene) -> None:
    module, plain = compiled(scene, Dropped(), batch()), Dropped()
    module.drop.p = plain.drop.p = 0.0
    expect_step(module, plain, batch())


@fault(6, "one submodule is put into eval mode, as frozen batch norms are", on=("alone", "dp2"), right=True)
def submodule_in_eval(scene: Scene) -> None:
    module, plain = compiled(scene, Normalised(), batch()), Normalised()
    expect_step(module, twin(plain), batch())
    plain(**batch())
    module.norm.eval()
    plain.norm.eval()
    expect_step(module, plain, batch())


class Counted(Net):
    """Warms up: the factor grows with the number of calls."""

    calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        loss: Tensor = super().forward(x, labels) * min(1.0, self.calls / 4)
        return loss


@fault(6, "forward counts its calls and computes with the count", right=True, words=("calls",), warning="calls")
def counter(scene: Scene) -> None:
    module, plain = compiled(scene, Counted(), batch()), Counted()
    for step in range(3):
        expect_value_of_call(module, plain, step)


def expect_value_of_call(module: nn.Module, plain: nn.Module, step: int) -> None:
    """One call of both."""
    expect_value(f"the loss of call {step}", module(**batch(step)), plain(**batch(step)))


class Drawn(Net):
    """Python's random numbers decide over a factor."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * random.choice((0.5, 2.0))


@fault(6, "forward draws from Python's random module", right=True, words=("random",), warning="random")
def python_draws(scene: Scene) -> None:
    random.seed(0)
    module = compiled(scene, Drawn(), batch())
    plain = Drawn()
    for seed in range(6):
        random.seed(seed)
        loss = module(**batch())
        random.seed(seed)
        expect_value("the loss", loss, plain(**batch()))


@fault(6, "a parameter is frozen behind compile", on=("alone", "shard2"), right=True)
def frozen_later(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    for each in (module, plain):
        each.blocks[0].requires_grad_(False)
    expect_step(module, plain, batch())


@fault(
    6,
    "a block is replaced by another one behind compile",
    on=("alone", "dp2"),
    right=True,
    words=("blocks.0|replaced",),
)
def replaced_block(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    for each in (module, plain):
        torch.manual_seed(5)
        each.blocks[0] = nn.Linear(8, 8)
    expect_step(module, plain, batch())


@fault(6, "a block is taken out behind compile", right=True, words=("blocks",))
def removed_block(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    for each in (module, plain):
        del each.blocks[1]
    expect_step(module, plain, batch())


@fault(6, "a parameter is replaced by a new one behind compile", on=("alone", "dp2"), right=True, words=("head",))
def replaced_parameter(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    for each in (module, plain):
        torch.manual_seed(5)
        each.head.weight = nn.Parameter(torch.randn(4, 8))
    expect_step(module, plain, batch())


@fault(6, "weights are loaded from a plain state dict behind compile", on=("alone", "shard4", "tp2"), right=True)
def loaded_weights(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    module.load_state_dict(Net(seed=3).state_dict())
    expect_step(module, Net(seed=3), batch())


@fault(6, "weights are set in place under no_grad, as initialisers do", on=("alone", "shard2"), right=True)
def weights_in_place(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    for each in (module, plain):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(0.5)
    expect_step(module, plain, batch())


@fault(6, "loss_fn closes over a number that changes behind compile", right=True, words=("loss_fn|closure|weight",))
def closure_of_the_loss(scene: Scene) -> None:
    held = {"weight": 1.0}
    module = compiled(scene, Bare(), {"x": batch()["x"], "labels": batch()["labels"]}, loss_fn=_loss_of(held))
    held["weight"] = 2.0
    loss = module(**batch())
    expect_value("the loss", loss, _loss_of(held)(Bare()(batch()["x"]), batch()))


def _loss_of(held: Mapping[str, float]) -> Any:
    def loss(output: Tensor, inputs: Any) -> Tensor:
        return nn.functional.cross_entropy(output, inputs["labels"]) * held["weight"]

    return loss


@fault(6, "an exponential average of the weights is kept beside", on=("alone", "shard2"), right=True)
def averaged_weights(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    averages = [{name: p.detach().clone() for name, p in each.named_parameters()} for each in (module, plain)]
    for each, average in zip((module, plain), averages, strict=True):
        optimizer = sgd(each.parameters())
        for seed in range(3):
            train(each, optimizer, [batch(seed)])
            for name, parameter in each.named_parameters():
                average[name].lerp_(parameter.detach(), 0.5)
    for name, kept in averages[0].items():
        expect_value(name, kept, averages[1][name])

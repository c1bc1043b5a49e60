"""Points 8, 9 and 10: gradients through other outputs, into inputs, and behind changed weights.

Each step is written once, as a user writes it, and made with the compiled and with the plain model; the gradients of
all parameters, and of the inputs where they have some, must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from benchmarks.faults.fault import Fault, Scene, Wrong, fault, make_fault
from benchmarks.faults.victims import (
    Bare,
    Net,
    Scored,
    backward,
    batch,
    compiled,
    expect_gradients,
    expect_value,
    expect_weights,
    expected_step,
    loss_of,
    sgd,
    whole,
)

Step = Callable[[nn.Module], None]
REFUSAL = ("differentiable|gradient",)


def _alike(module: nn.Module, plain: nn.Module, step: Step) -> None:
    """One step of both; their gradients must agree."""
    step(module)
    step(plain)
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in module.named_parameters():
        expected = wanted[name]
        if expected is None or parameter.grad is None:
            if (expected is None) != (parameter.grad is None) and (expected is None or expected.any()):
                raise Wrong(f"{name} has {'no' if parameter.grad is None else 'a'} gradient")
            continue
        expect_value(f"the gradient of {name}", parameter.grad, expected)


def _plain_of(output: Tensor) -> Tensor:
    return whole(output)


def _added_term(model: nn.Module) -> None:
    output = model(**batch())
    backward(output["loss"] + 0.1 * _plain_of(output["logits"]).pow(2).mean())


def _only_logits(model: nn.Module) -> None:
    backward(_plain_of(model(**batch())["logits"]).pow(2).mean())


def _loss_outside(model: nn.Module) -> None:
    backward(F.cross_entropy(_plain_of(model(**batch())["logits"]), batch()["labels"]))


def _scaled_loss(model: nn.Module) -> None:
    backward(3.0 * model(**batch())["loss"])


def _twice(model: nn.Module) -> None:
    loss = model(**batch())["loss"]
    backward(loss, retain_graph=True)
    backward(loss)


def _two_calls(model: nn.Module) -> None:
    backward(model(**batch(1))["loss"] + model(**batch(2))["loss"])


def _two_calls_backwards(model: nn.Module) -> None:
    losses = [model(**batch(seed))["loss"] for seed in (1, 2)]
    backward(losses[1])
    backward(losses[0])


def _by_autograd_grad(model: nn.Module) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(**batch())["loss"], parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def _accumulated(model: nn.Module) -> None:
    for seed in (1, 2, 3):
        backward(model(**batch(seed))["loss"] / 3)


OUTPUT_STEPS: dict[str, tuple[str, Step, tuple[str, ...]]] = {
    "added_term": ("a term of the logits is added to the loss", _added_term, ("alone", "dp2", "tp2", "pp2")),
    "only_logits": ("backward begins at the logits, the loss is not used", _only_logits, ("alone", "shard2")),
    "loss_outside": ("the loss is computed outside from the logits", _loss_outside, ("alone", "dp2", "tp2")),
    "scaled_loss": ("the loss is scaled outside", _scaled_loss, ("alone", "dp2", "pp2")),
    "backward_twice": ("backward runs twice with retain_graph", _twice, ("alone", "dp2")),
    "two_calls": ("the losses of two calls are added before one backward", _two_calls, ("alone", "shard2", "pp2")),
    "two_calls_backwards": ("two calls, and backward in the other order", _two_calls_backwards, ("alone", "shard4")),
    "autograd_grad": ("gradients are taken by torch.autograd.grad", _by_autograd_grad, ("alone", "shard2")),
    "accumulated": ("three backwards add up", _accumulated, ("alone", "shard4", "tp2", "pp2")),
}


def _with_outputs(step: Step, scene: Scene) -> None:
    _alike(compiled(scene, Scored(), batch()), Scored(), step)


OUTPUTS: tuple[Fault, ...] = tuple(
    make_fault(8, name, does, partial(_with_outputs, step), layout=layout, right=True, words=REFUSAL)
    for name, (does, step, layouts) in OUTPUT_STEPS.items()
    for layout in layouts
)


@fault(
    8, "differentiable= says beforehand that the logits will carry a gradient", on=("alone", "dp2", "tp2"), right=True
)
def said_beforehand(scene: Scene) -> None:
    module = compiled(scene, Scored(), batch(), differentiable=["logits"])
    _alike(module, Scored(), _added_term)


class TwoLosses(Net):
    """forward -> (loss, auxiliary loss)."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores = self.scores(x)
        return F.cross_entropy(scores, labels), scores.logsumexp(-1).pow(2).mean()


class NamedLosses(TwoLosses):
    """forward -> {"class": loss, "size": loss}."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        first, second = super().forward(x, labels)
        return {"class": first, "size": second}


def _sum_of_losses(model: nn.Module) -> None:
    output = model(**batch())
    first, second = output.values() if isinstance(output, dict) else output
    backward(first + 0.3 * second)


def _second_alone(model: nn.Module) -> None:
    output = model(**batch())
    backward((list(output.values()) if isinstance(output, dict) else output)[1])


def _one_after_the_other(model: nn.Module) -> None:
    first, second = model(**batch()).values()
    backward(first, retain_graph=True)
    backward(second)


@fault(8, "the model returns two losses in a tuple; their sum is trained", on=("alone", "dp2", "tp2"), right=True)
def losses_in_a_tuple(scene: Scene) -> None:
    _alike(compiled(scene, TwoLosses(), batch()), TwoLosses(), _sum_of_losses)


@fault(8, "the model returns two losses in a tuple, and runs in stages", on=("pp2",), right=True, words=REFUSAL)
def losses_of_stages(scene: Scene) -> None:
    losses_in_a_tuple[0].run(scene)


@fault(8, "the model returns two losses in a dictionary; their sum is trained", on=("alone", "shard2"), right=True)
def losses_in_a_dictionary(scene: Scene) -> None:
    _alike(compiled(scene, NamedLosses(), batch()), NamedLosses(), _sum_of_losses)


@fault(8, "only the second loss is trained", on=("alone", "dp2"), right=True, words=REFUSAL)
def second_loss(scene: Scene) -> None:
    _alike(compiled(scene, TwoLosses(), batch()), TwoLosses(), _second_alone)


@fault(8, "both losses have a backward of their own", right=True, words=REFUSAL)
def backward_of_each(scene: Scene) -> None:
    _alike(compiled(scene, NamedLosses(), batch()), NamedLosses(), _one_after_the_other)


@fault(8, "a model without a loss is compiled without loss_fn, the loss is computed outside", on=("alone", "dp2"),
       right=True, words=("loss",))  # fmt: skip
def no_loss_at_all(scene: Scene) -> None:
    module = compiled(scene, Bare(), {"x": batch()["x"]})

    def step(model: nn.Module) -> None:
        backward(F.cross_entropy(_plain_of(model(x=batch()["x"])), batch()["labels"]))

    _alike(module, Bare(), step)


@fault(8, "a gradient of a gradient is asked for", on=("alone", "dp2"), right=True, words=REFUSAL)
def second_order(scene: Scene) -> None:
    def step(model: nn.Module) -> None:
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss_of(model(**batch())), parameters, create_graph=True)
        sum(whole(each).pow(2).sum() for each in first).backward()  # type: ignore[union-attr]

    _alike(compiled(scene, Net(), batch()), Net(), step)


def _leaf(seed: int = 0) -> Tensor:
    return batch(seed)["x"].requires_grad_()


def _input_gradient(module: nn.Module, plain: nn.Module, seed: int = 0) -> None:
    xs = []
    for model in (module, plain):
        xs.append(_leaf(seed))
        model.zero_grad()
        backward(loss_of(model(x=xs[-1], labels=batch(seed)["labels"])))
        if xs[-1].grad is None:
            raise Wrong("the input has no gradient")
    expect_value("the gradient of the input", xs[0].grad, xs[1].grad)  # type: ignore[arg-type]
    wanted = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        expect_value(f"the gradient of {name}", parameter.grad, wanted[name].grad)  # type: ignore[arg-type]


@fault(9, "an input needs a gradient, and the model runs in stages", on=("pp2",), right=True, words=("gradient", "pp"))
def input_of_stages(scene: Scene) -> None:
    _input_gradient(compiled(scene, Net(), {**batch(), "x": _leaf()}), Net())


@fault(9, "an input needs a gradient from the beginning", on=("alone", "dp2", "tp2"), right=True)
def input_from_the_beginning(scene: Scene) -> None:
    module = compiled(scene, Net(), {**batch(), "x": _leaf()})
    _input_gradient(module, Net())


@fault(9, "an input needs a gradient at a later call only", on=("alone", "dp2", "shard4"), right=True)
def input_later(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    backward(loss_of(module(**batch())))
    _input_gradient(module, Net(), seed=1)


@fault(9, "another model stands in front and is trained through the input", on=("alone", "dp2"), right=True)
def encoder_in_front(scene: Scene) -> None:
    torch.manual_seed(3)
    front = [nn.Linear(8, 8), nn.Linear(8, 8)]
    front[1].load_state_dict(front[0].state_dict())
    module, plain = compiled(scene, Net(), batch()), Net()
    for encoder, model in zip(front, (module, plain), strict=True):
        backward(loss_of(model(x=encoder(batch()["x"]), labels=batch()["labels"])))
        if encoder.weight.grad is None:
            raise Wrong("the model in front has no gradient")
    expect_value("the gradient in front", front[0].weight.grad, front[1].weight.grad)  # type: ignore[arg-type]


@fault(9, "a step against the gradient of the input, as adversarial training makes", on=("alone", "dp2"), right=True)
def adversarial(scene: Scene) -> None:
    def step(model: nn.Module) -> None:
        x = _leaf()
        (gradient,) = torch.autograd.grad(loss_of(model(x=x, labels=batch()["labels"])), x)
        backward(loss_of(model(x=(x + 0.1 * gradient.sign()).detach(), labels=batch()["labels"])))

    _alike(compiled(scene, Net(), batch()), Net(), step)


@fault(9, "the norm of the gradient of the input is trained", on=("alone", "dp2"), right=True, words=REFUSAL)
def gradient_penalty(scene: Scene) -> None:
    def step(model: nn.Module) -> None:
        x = _leaf()
        loss = loss_of(model(x=x, labels=batch()["labels"]))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        backward(loss + gradient.pow(2).sum())

    _alike(compiled(scene, Net(), batch()), Net(), step)


def _plain_step(model: nn.Module) -> None:
    backward(loss_of(model(**batch())))


class Physics(Net):
    """A loss on the derivative of its output by its input."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.requires_grad_()
        scores = self.scores(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return F.cross_entropy(scores, labels) + slope.pow(2).mean()


@fault(9, "forward differentiates by its input, as physics-informed networks do", on=("alone", "dp2"), right=True,
       words=("autograd.grad|gradient",))  # fmt: skip
def physics_informed(scene: Scene) -> None:
    _alike(compiled(scene, Physics(), batch()), Physics(), _plain_step)


def _change(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)


def _step_of_optimizer(module: nn.Module) -> None:
    optimizer = sgd(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _load(module: nn.Module) -> None:
    module.load_state_dict(Net(seed=4).state_dict())


BETWEEN: dict[str, tuple[str, Callable[[nn.Module], None], tuple[str, ...]]] = {
    "changed_in_place": ("a weight is changed in place", _change, ("alone", "shard2", "tp2")),
    "optimizer_between": ("an optimizer steps", _step_of_optimizer, ("alone", "dp2", "pp2")),
    "loaded_between": ("other weights are loaded", _load, ("alone", "shard4")),
}


def _changed_between(change: Callable[[nn.Module], None], scene: Scene) -> None:
    """Right: the gradient at the weights that forward saw."""
    module, plain = compiled(scene, Net(), batch()), Net()
    wanted = expected_step(plain, batch())
    loss = loss_of(module(**batch()))
    gradients = {name: p.grad for name, p in module.named_parameters()}
    change(module)
    if change is _step_of_optimizer:  # it made its own gradients
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]
    backward(loss)
    expect_gradients(module, wanted)


CHANGED_BETWEEN: tuple[Fault, ...] = tuple(
    make_fault(10, name, f"{does} between forward and backward", partial(_changed_between, change), layout=layout,
               words=("modified|changed",), as_torch=True, right=True)
    for name, (does, change, layouts) in BETWEEN.items()
    for layout in layouts
)  # fmt: skip


@fault(10, "an input is changed in place between forward and backward", words=("modified|changed",), as_torch=True,
       right=True)  # fmt: skip
def input_changed_between(scene: Scene) -> None:
    module, inputs = compiled(scene, Net(), batch()), batch()
    loss = loss_of(module(**inputs))
    inputs["x"].mul_(2.0)
    backward(loss)
    reference = Net()
    backward(loss_of(reference(**batch())))
    for name, parameter in reference.named_parameters():
        expect_value(f"the gradient of {name}", module.get_parameter(name).grad, parameter.grad)  # type: ignore[arg-type]


def _clipped(clip: Callable[[Any], Any], scene: Scene) -> None:
    module, plain = compiled(scene, Net(layers=4), batch()), Net(layers=4)
    for model in (module, plain):
        train_clipped(model, clip if model is module else _torch_norm)
    expect_weights(module, plain)


def train_clipped(model: nn.Module, clip: Callable[[Any], Any]) -> None:
    """Three steps with clipped gradients."""
    optimizer = sgd(model.parameters())
    for seed in range(3):
        optimizer.zero_grad()
        backward(loss_of(model(**batch(seed))))
        clip(list(model.parameters()))
        optimizer.step()


def _torch_norm(parameters: list[Tensor]) -> object:
    return torch.nn.utils.clip_grad_norm_(parameters, 0.1)


def _our_norm(parameters: list[Tensor]) -> object:
    return autopar.clip_grad_norm_(parameters, 0.1)


def _torch_total(parameters: list[Tensor]) -> object:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return torch.nn.utils.clip_grads_with_norm_(parameters, 0.1, whole(norm))


CLIPPED: tuple[Fault, ...] = tuple(
    make_fault(10, name, f"gradients are clipped by {what}", partial(_clipped, clip), layout=layout, right=True,
               words=words)
    for name, what, clip, words in (
        ("torch_clip_grad_norm", "torch's clip_grad_norm_", _torch_norm, ("autopar.clip_grad_norm_",)),
        ("our_clip_grad_norm", "autopar.clip_grad_norm_", _our_norm, ()),
        ("torch_total_norm", "torch's get_total_norm", _torch_total, ("autopar.clip_grad_norm_",)),
    )
    for layout in ("alone", "shard2", "tp2", "pp2", "pp2shard2")
)  # fmt: skip

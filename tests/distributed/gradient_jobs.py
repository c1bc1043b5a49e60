"""Jobs of the workers: gradients of several losses, of outputs and of inputs, and what must not be differentiated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor
from autopar.runtime.pipeline import differentiable_parts
from autopar.runtime.step import batches, whole_step
from autopar.runtime.weights import shard_model
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.pipeline_jobs import captured as captured_case
from tests.distributed.pipeline_models import CASES
from tests.distributed.training_jobs import largest_error


class Judged(nn.Module):
    """Two linear layers, and one beside the second. forward(x (B, 8), y (B,)) -> the loss; two further ones, of which
    the last alone reads the layer beside; the logits (B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        self.beside = nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(x))
        logits = self.second(hidden)
        loss = nn.functional.cross_entropy(logits, y)
        return {"aux": logits.pow(2).mean(), "loss": loss, "value": self.beside(hidden).sum(), "logits": logits}


def judged() -> Judged:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return Judged()


def samples(wants_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """(x (8, 8), y (8,)), the same for every call."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 8, generator=generator).requires_grad_(wants_gradient)
    return x, torch.randint(0, 4, (8,), generator=generator)


NAMED = ("logits",)


def captured(**_: Any) -> bool:
    """Capture the model with every gradient that the jobs ask for."""
    made = [capture_once("judged", judged(), samples(), differentiable=named) for named in ((), NAMED)]
    made.append(capture_once("judged", judged(), samples(True), evaluates=True))
    return any(made)


def _pair(dims: dict[str, int], **options: Any) -> tuple[autopar.ParallelModule, Judged]:
    module = compile_once("judged", judged(), samples(), dims=dims, **options)
    return module, judged()


def _backward(module: nn.Module, loss_of: Callable[[dict[str, Tensor]], Tensor]) -> None:
    module.zero_grad()
    loss_of(module(*samples())).backward()


@prepared_by(captured)
def losses(dims: dict[str, int]) -> dict[str, float]:
    """Errors of the gradients of sums of outputs, in one backward pass and in two."""
    module, reference = _pair(dims)
    named, _ = _pair(dims, differentiable=NAMED)
    sums: dict[str, tuple[nn.Module, Callable[[dict[str, Tensor]], Tensor]]] = {
        "both": (module, lambda out: out["loss"] + 0.3 * out["aux"]),
        "second": (module, lambda out: out["aux"]),
        "all": (module, lambda out: out["loss"] + out["aux"] + out["value"]),
        "first": (named, lambda out: out["loss"]),
        "logits": (named, lambda out: out["loss"] + module.full(out["logits"]).pow(3).sum()),
    }
    errors = {}
    for name, (compiled, loss_of) in sums.items():
        _backward(compiled, loss_of)
        _backward(reference, loss_of)
        errors[name] = largest_error(compiled, reference)
    for each in (module, reference):
        each.zero_grad()
        output = each(*samples())
        output["loss"].backward(retain_graph=True)
        output["aux"].backward()
    return {**errors, "in turn": largest_error(module, reference)}


@prepared_by(captured)
def of_inputs(dims: dict[str, int], mode: str = "global", trains: bool = True) -> dict[str, float]:
    """Errors of the gradients of an input, and of the parameters beside it, behind a call without them."""
    module, reference = _pair(dims, batch=mode)
    index, count = module.data_shard() if mode == "local" else (0, 1)
    size = 8 // count
    mine = slice(index * size, (index + 1) * size)
    errors = {}
    for each in (module, reference):
        each.train(trains)
    if trains:
        module(*(tensor[mine] for tensor in samples()))["loss"].backward()
        module.zero_grad()
    x, y = samples()
    part, whole = x[mine].clone().requires_grad_(), x.clone().requires_grad_()
    module(part, y[mine])["loss"].backward()
    reference(whole, y)["loss"].backward()
    assert part.grad is not None
    assert whole.grad is not None
    errors["input"] = float((part.grad - whole.grad[mine]).norm() / whole.grad[mine].norm())
    errors["parameters"] = largest_error(module, reference)
    return errors


def _message(action: Callable[[], Any]) -> str:
    try:
        action()
    except autopar.GradientError as error:
        return str(error)
    return ""


@prepared_by(captured)
def refused(dims: dict[str, int]) -> dict[str, str]:
    """What is said of gradients that would be others, "" where nothing."""
    module, _ = _pair(dims)
    return {
        "output": _message(lambda: _undeclared(module)),
        "weights": _message(lambda: _changed(module)),
        "twice": _message(lambda: _twice(module)),
    }


def _undeclared(module: nn.Module) -> None:
    _backward(module, lambda out: out["loss"] + whole_output(module, out["logits"]).pow(3).sum())


def whole_output(module: nn.Module, output: Tensor) -> Tensor:
    """The whole output on every rank, of the plain model as of the compiled one."""
    whole: Tensor = module.full(output) if isinstance(module, autopar.ParallelModule) else output
    return whole


def _changed(module: nn.Module) -> None:
    module.zero_grad()
    output = module(*samples())
    with torch.no_grad():
        module.get_parameter("second.weight").mul_(2.0)
    output["loss"].backward()


def _twice(module: nn.Module) -> None:
    x, y = samples(True)
    module.zero_grad()
    loss = module(x, y)["loss"]
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.pow(2).sum()).backward()


@prepared_by(captured)
def unguarded(dims: dict[str, int]) -> dict[str, float]:
    """The mutation: errors of the gradients of what `refused` refuses, without its guards."""
    errors = {}
    for name, action in (("output", _undeclared), ("weights", _changed), ("twice", _twice)):
        module, reference = _pair(dims)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(whole_step, "refuse_changed", lambda _: None)
            patch.setattr(whole_step, "given_tangents", _all_tangents)
            patch.setattr("autopar.runtime.step.differentiation._Differentiated.apply", lambda _, gradient: gradient)
            action(module)
        if name == "weights":
            _backward(reference, lambda out: out["loss"])
        else:
            action(reference)
        errors[name] = largest_error(module, reference)
    return errors


def _all_tangents(step: Any, tangents: Any, taken: Any) -> dict[str, Any]:
    return dict(zip((output.name for output in step.forward_outputs), tangents, strict=True))


@prepared_by(captured)
def gathered_nowhere(dims: dict[str, int]) -> float:
    """The mutation: the error of an input's gradient whose blocks are not brought together."""

    def own_block_alone(gradient: Tensor, shape: Any, passed: Any, wanted: Any, groups: Any) -> Tensor:
        whole = gradient.new_zeros(shape)
        batches.local_block(whole, passed, groups.mesh, groups.place).copy_(gradient)
        return whole

    module, reference = _pair(dims)
    (x, y), (whole, _) = samples(True), samples(True)
    output = module(x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "exchange_block", own_block_alone)
        output["loss"].backward()
    reference(whole, y)["loss"].backward()
    assert x.grad is not None
    assert whole.grad is not None
    return float((x.grad - whole.grad).norm() / whole.grad.norm())


@prepared_by(captured_case)
def in_stages(name: str, plan: bytes, planted: bool = False) -> dict[str, Any]:
    """What stages say of torch's clipping and of a gradient of the logits, beside ours and the plain model's norm.

    planted: the mutation, without guards: what torch's clipping makes of it, and the error of the gradients."""
    case = CASES[name]
    reference = case.model()
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(shard_model, "mark_gradients", lambda *_: None)
            patch.setattr(differentiable_parts, "given_tangents", _all_tangents)
        module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan))
        reference(**case.batch(0))["loss"].backward()
        said: dict[str, Any] = {
            "logits": _message(
                lambda: (lambda out: (out["loss"] + module.full(out["logits"]).sum()).backward())(
                    module(**case.batch(0))
                )
            )
        }
        module.zero_grad()
        module(**case.batch(0))["loss"].backward()
        plain = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
        said["ours"] = abs(float(autopar.clip_grad_norm_(module.parameters(), 1e9)) / float(plain) - 1.0)
        if planted:
            theirs = nn.utils.clip_grad_norm_(module.parameters(), 1e9).full_tensor()  # type: ignore[attr-defined]
            return {**said, "theirs": abs(float(theirs) / float(plain) - 1.0)}
        for foreach in (None, False):
            said[f"foreach={foreach}"] = _message(
                lambda: nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=foreach)  # noqa: B023  # called now
            )
        said["total"] = _message(
            lambda: nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    optimizer.step()
    module(**case.batch(0))["loss"].backward()
    said["again"] = _message(lambda: nn.utils.clip_grad_norm_(module.parameters(), 1.0))
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    said["copied"] = all(torch.equal(full_tensor(copy.deepcopy(g)), full_tensor(g)) for g in gradients)
    return said

"""Agreement: does a compiled model compute the loss and the gradients of the plain one?

The plain model runs twice, in its own precision and in fp64: how far these two lie apart says how exact fp32 can be
asked to be. A gradient agrees when |dg| / |g| is at most the larger of 1e-5 and ten times that distance; a gradient
that is in fp64 below 1e-6 of the largest one (a key bias of attention, a bias in front of a batch norm: the true
gradient is 0, in fp32 it is noise) is measured against the largest.

Where that distance would allow more than 1e-3, a comparison that holds proves nothing:

    own error 0.43 of fp32 against fp64, so 4.3 is allowed; the compiled model is off by 0.94     "no evidence"
    the same model and inputs `in_double`: 1e-5 is allowed                                       "agrees", or not
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.step.batches import route

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
Verdict: TypeAlias = Literal["agrees", "disagrees", "no evidence"]

TOLERANCE, ROUNDING_FACTOR, NEGLIGIBLE = 1e-5, 10.0, 1e-6
CEILING = 1e-3
"""The most that may be allowed where a comparison is to prove something."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Loss and gradients of the plain model; `allowed`: relative error permitted per parameter ("": the loss);
    `scales`: the norm that the error of a gradient is relative to."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    allowed: Mapping[str, float]
    scales: Mapping[str, float]

    @property
    def is_evidence(self) -> bool:
        """Whether nothing may be off by more than `CEILING`."""
        return max(self.allowed.values()) <= CEILING


@dataclass(frozen=True, slots=True)
class Agreement:
    """Relative error of the loss, the parameter whose gradient is worst, and its error beside what is allowed.
    verdict: "no evidence" where all is within what is allowed and that is more than `CEILING` somewhere."""

    loss_error: float
    worst_parameter: str
    gradient_error: float
    allowed: float
    verdict: Verdict

    @property
    def agrees(self) -> bool:
        """Whether the loss and all gradients were shown to be those of the plain model."""
        return self.verdict == "agrees"


def loss_of(output: object) -> Tensor:
    """The output itself, or its `.loss`."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    assert isinstance(loss, Tensor), "the models of the zoo return a loss"
    return loss


def reference(model: nn.Module, inputs: Mapping[str, Tensor], loss_fn: LossFunction | None = None) -> Reference:
    """Run copies of the plain model; the model itself is left as it was. loss_fn: as of `autopar.compile`."""
    loss, gradients = _loss_and_gradients(copy.deepcopy(model), inputs, loss_fn)
    try:
        exact_loss, exact = _loss_and_gradients(*in_double(model, inputs), loss_fn)
        is_usable = all(bool(value.isfinite().all()) for value in (exact_loss, *exact.values()))
    except RuntimeError:  # written for one precision (XGLM)
        is_usable = False
    if not is_usable:  # also where only fp64 overflows (CANINE): nothing beyond the tolerance is allowed
        exact_loss, exact = loss, gradients
    largest = max(gradient.double().norm().item() for gradient in exact.values())
    allowed = {"": max(TOLERANCE, ROUNDING_FACTOR * _relative(loss, exact_loss, _norm(exact_loss)))}
    scales = {name: _scale(gradient, largest) for name, gradient in exact.items()}
    for name, gradient in gradients.items():
        allowed[name] = max(TOLERANCE, ROUNDING_FACTOR * _relative(gradient, exact[name], scales[name]))
    return Reference(loss, gradients, allowed, scales)


def in_double(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of the model, and its inputs, in fp64."""
    doubled = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    return copy.deepcopy(model).double(), doubled


def evident_reference(
    model: nn.Module, inputs: Mapping[str, Tensor], loss_fn: LossFunction | None = None
) -> tuple[nn.Module, dict[str, Tensor], Reference]:
    """(model, inputs, their reference), all three in fp64 where agreement in their own precision proved nothing."""
    expected = reference(model, inputs, loss_fn)
    if expected.is_evidence:
        return model, dict(inputs), expected
    model, doubled = in_double(model, inputs)
    return model, doubled, reference(model, doubled, loss_fn)


def compare(compiled: nn.Module, inputs: Mapping[str, Tensor], expected: Reference) -> Agreement:
    """One forward and backward of the compiled model (its gradients are gathered) against the plain one.

    A gradient of exact zeros equals None, which the plain model leaves where an expert has no rows.
    """
    loss, gradients = _loss_and_gradients(compiled, inputs)
    gradients = {name: g for name, g in gradients.items() if name in expected.gradients or g.any()}
    assert set(gradients) == set(expected.gradients), "other parameters have gradients"
    errors = {name: _relative(g, expected.gradients[name], expected.scales[name]) for name, g in gradients.items()}
    worst = max(errors, key=lambda name: errors[name] / expected.allowed[name])
    loss_error = _relative(loss, expected.loss, _norm(expected.loss))
    is_within = loss_error <= expected.allowed[""] and errors[worst] <= expected.allowed[worst]
    verdict: Verdict = "disagrees" if not is_within else "agrees" if expected.is_evidence else "no evidence"
    return Agreement(loss_error, worst, errors[worst], expected.allowed[worst], verdict)


def _loss_and_gradients(
    model: nn.Module, inputs: Mapping[str, Tensor], loss_fn: LossFunction | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    _, arguments = route(model, (), dict(inputs), loss_fn is not None)
    batch = arguments.pop("batch", arguments) if loss_fn is not None else None
    output = model(**arguments)
    loss = loss_of(output if loss_fn is None else loss_fn(output, batch))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _norm(value: Tensor) -> float:
    return max(float(value.double().norm()), 1e-30)


def _scale(exact: Tensor, largest: float) -> float:
    """The norm of a gradient in fp64, the largest one where it is negligible beside it."""
    return largest if _norm(exact) < NEGLIGIBLE * largest else _norm(exact)


def _relative(value: Tensor, expected: Tensor, scale: float) -> float:
    return float((value.double() - expected.double()).norm().item() / scale)

"""Verification: does the compiled module compute what the plain model computes?

    autopar.verify(module, batch)        # Verification with the errors, or VerificationError naming the worst

Loss and every gradient are compared with the plain model on one device, with the same weights and the same global
batch. A parameter passes when |dg| / |g| <= max(1e-5, 10 x the plain model's own error of fp32 against fp64); a
gradient below 1e-6 of the largest is compared with the largest. With precision="bf16" the plain model computes under
the same casts, and the machine epsilon of bf16 takes the place of 1e-5. Where the plain model's own error allows more
than a hundred times that, agreement proves nothing, and the error says so. A model that draws random numbers (dropout)
is compared with its own program on one device and the same seed, since only that draws the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from autopar._compat import tree_map_only
from autopar.capture import normalize_example_inputs
from autopar.capture.precision import REDUCED_IN, canonical_names, computing_in, narrowed, precision_dtype
from autopar.capture.training_step import find_loss
from autopar.errors import ConfigurationError, VerificationError
from autopar.layouts.placement import Mesh, replicated
from autopar.ops.float8 import DTYPE as FLOAT8
from autopar.passes.lowering.chain import join_kernels, lowered_step
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import OperatorPlan, ParameterPlan
from autopar.runtime.consensus import from_every_rank
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.parameters import full_tensor
from autopar.runtime.step.batches import input_leaves
from autopar.runtime.step.differentiation import unreached
from autopar.runtime.step.emitted_step import Step

RELATIVE_ERROR = 1e-5
OWN_ERROR_FACTOR = 10.0
EVIDENCE_FACTOR = 100.0
"""A limit of so many times the tolerance (1e-3 in fp32) is the largest that proves something."""
TINY_FRACTION = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Errors of a compiled module. gradients: parameter name -> |dg| / |g|; limits: what each may be."""

    loss: float
    reference_loss: float
    loss_limit: float
    gradients: Mapping[str, float]
    limits: Mapping[str, float]

    @property
    def loss_error(self) -> float:
        """|dl| / |l|."""
        return abs(self.loss - self.reference_loss) / max(abs(self.reference_loss), torch.finfo(torch.float32).tiny)

    @property
    def worst(self) -> str:
        """The parameter that is furthest from (or beyond) its limit; "" where there is none."""
        return max(self.gradients, key=lambda name: _excess(self.gradients[name], self.limits[name]), default="")


def _excess(error: float, limit: float) -> float:
    return float("inf") if error != error else error / limit


def compare(module: ParallelModule, example_inputs: Any) -> Verification:
    """Compare `module` with the plain model; all ranks call it with the same global batch of real tensors.

    Gradients of the module are left as they were. Raises VerificationError naming the worst parameter, with numbers,
    or the one whose limit is so wide that agreement is no evidence, and ConfigurationError for inputs without data or a
    module that returns no loss, or whose plan rounds what it saves.
    """
    args, kwargs = normalize_example_inputs(example_inputs)
    _check_real((args, kwargs))
    step, leaves = module.step_for(args, kwargs)
    if step.plan.rounds:
        raise ConfigurationError(
            "the plan rounds what forward saves (lossy=), so its gradients are right in the mean and not one by one: "
            "verify a module of a plan without lossy="
        )
    plain = cast(nn.Module, module.plain_model())
    rounded = step.plan.implementations  # operators whose values are not those of the plain model
    alone = _alone(module, step, plain, leaves) if _is_random(step) or rounded else None
    loss, gradients = _compiled(module, args, kwargs)
    if _is_random(step):
        plain.eval()  # its own rounding error is measured without random numbers
    own_loss, own = _plain(plain, module, args, kwargs, None)
    exact_loss, exact = _plain(plain, module, args, kwargs, torch.float64)
    dtypes = (precision_dtype(module.precision), REDUCED_IN[module.plan.reduce_dtype], FLOAT8 if rounded else None)
    floor = max(RELATIVE_ERROR, *(torch.finfo(dtype or torch.float32).eps for dtype in dtypes))
    reference_loss, reference = (own_loss, own) if alone is None else alone
    result = Verification(
        loss=loss,
        reference_loss=reference_loss,
        loss_limit=max(floor, OWN_ERROR_FACTOR * _relative(own_loss, exact_loss)),
        gradients=_errors(gradients, reference, reference),
        limits=_limits(_errors(own, exact, own), floor),
    )
    _check(result)
    _check_evidence(result, EVIDENCE_FACTOR * floor)
    return result


def _check(result: Verification) -> None:
    if not result.loss_error <= result.loss_limit:
        raise VerificationError(
            f"the loss is {result.loss:.9g}, the plain model has {result.reference_loss:.9g}: relative error "
            f"{result.loss_error:.2e}, allowed {result.loss_limit:.2e} (worst gradient: {_worst(result)})"
        )
    name = result.worst
    if name and not result.gradients[name] <= result.limits[name]:
        raise VerificationError(
            f"the gradient of {_worst(result)}; the loss agrees to {result.loss_error:.2e}, "
            f"{sum(not result.gradients[n] <= result.limits[n] for n in result.gradients)} of {len(result.gradients)} "
            "gradients are beyond their limit"
        )


def _check_evidence(result: Verification, most: float) -> None:
    limits = {"the loss": result.loss_limit} | {f"the gradient of {n}": limit for n, limit in result.limits.items()}
    name = max(limits, key=lambda each: limits[each])
    if not limits[name] <= most:
        raise VerificationError(
            f"no evidence: all errors are within their limits, but rounding of the plain model allows {name} to be off "
            f"by {limits[name]:.2e}, and more than {most:.0e} proves nothing; verify a copy of the model in fp64, "
            'model.double() with inputs of float64 and precision="fp32"'
        )


def _worst(result: Verification) -> str:
    name = result.worst
    return (
        f"{name} has relative error {result.gradients[name]:.2e}, allowed {result.limits[name]:.2e}" if name else "none"
    )


def _check_real(inputs: Any) -> None:
    def check(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta or type(tensor) is not torch.Tensor:
            raise ConfigurationError("verify needs real input tensors; these are fake or on the meta device")
        return tensor

    tree_map_only(torch.Tensor, check, inputs)


def _compiled(module: ParallelModule, args: Any, kwargs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and full gradients of one step of the module; its `.grad`s and buffers are put back."""
    kept = {name: parameter.grad for name, parameter in module.named_parameters()}
    buffers = {name: copy.deepcopy(buffer) for name, buffer in module.named_buffers()}
    for parameter in module.parameters():
        parameter.grad = None
    loss = find_loss(module.run_global(args, kwargs))
    if loss is None:
        raise ConfigurationError("verify needs a module that returns a loss; pass loss_fn to autopar.compile")
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = from_every_rank(
        {n: full_tensor(p.grad) for n, p in module.named_parameters() if p.grad is not None}, module.device
    )
    for name, parameter in module.named_parameters():
        parameter.grad = kept[name]
    for name, buffer in module.named_buffers():
        buffer.data = buffers[name]
    return float(loss.detach()), gradients


def _is_random(step: Step) -> bool:
    return any(value.role == "seed" for value in step.lowered.inputs)


def _alone(
    module: ParallelModule, step: Step, plain: nn.Module, leaves: list[Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the captured program on one device, with the seed of the module's next call."""
    lowered = lowered_step(step.whole, one_device_plan(step.plan), 0, until=join_kernels).only.program
    arguments = {value.name: leaves[leaf] for value, leaf in input_leaves(step.whole)}
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    losses = {output.name for output in lowered.outputs if output.role == "loss"}
    values = []
    for value in lowered.inputs:
        if value.role == "tangent":
            values.append(torch.full(value.shape, float(value.name in losses), dtype=value.dtype))
        elif value.role == "seed":
            values.append(torch.full(value.shape, module.seed(), dtype=value.dtype))
        else:
            values.append((arguments[value.name] if value.role == "input" else tensors[value.name]).detach())
    with torch.no_grad():
        results = list(zip(lowered.outputs, lowered.graph_module(*values), strict=True))
    loss = next(float(result) for output, result in results if output.role == "loss")
    left_out = unreached(step, dict.fromkeys(losses, torch.ones(())))
    gradients = {o.name: result for o, result in results if o.role == "gradient" and o.name not in left_out}
    return loss, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def one_device_plan(plan: Plan) -> Plan:
    """The same graph's plan on one device: everything replicated."""
    whole = replicated(1)

    def alone(operator: OperatorPlan) -> OperatorPlan:
        return OperatorPlan(
            axes=(None,),
            inputs=(whole,) * len(operator.inputs),
            outputs=(whole,) * len(operator.outputs),
            implementation=operator.implementation,
        )

    return plan.with_(
        mesh=Mesh(("one",), (1,)),
        pipeline=None,
        parameters={name: ParameterPlan(stored=whole, used=whole, gradient=whole) for name in plan.parameters},
        operators={name: alone(operator) for name, operator in plan.operators.items()},
        inputs=dict.fromkeys(plan.inputs, whole),
        buffers=dict.fromkeys(plan.buffers, whole),
        outputs=dict.fromkeys(plan.outputs, whole),
    )


def _plain(
    model: nn.Module, module: ParallelModule, args: Any, kwargs: Any, dtype: torch.dtype | None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the plain model, in its own precision or in `dtype`."""
    model = copy.deepcopy(model)
    if dtype is not None:
        model = model.to(dtype)
        args, kwargs = tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, (args, kwargs)
        )
    narrow = None if dtype is not None else precision_dtype(module.precision)
    forward_args, forward_kwargs, batch = narrowed(module.split_batch(args, kwargs), narrow)
    with computing_in(model, narrow, canonical_names(model)):
        output = model(*forward_args, **forward_kwargs)
        loss = find_loss(output if module.loss_fn is None else module.loss_fn(output, batch))
    assert loss is not None
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), torch.finfo(torch.float32).tiny)


def _errors(
    gradients: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], scale: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """|dg| / |g| per parameter of `reference`; tiny gradients against the largest norm. A missing one is infinite."""
    norms = {name: float(gradient.double().norm()) for name, gradient in scale.items()}
    largest = max(norms.values(), default=0.0)
    errors = {name: float("inf") for name in reference.keys() ^ gradients.keys()}
    for name in reference.keys() & gradients.keys():
        distance = float((gradients[name].double() - reference[name].double()).norm())
        norm = norms[name] if norms.get(name, 0.0) > TINY_FRACTION * largest else largest
        errors[name] = distance / norm if norm else distance
    return errors


def _limits(own: Mapping[str, float], floor: float) -> dict[str, float]:
    return {name: max(floor, OWN_ERROR_FACTOR * error) for name, error in own.items()}

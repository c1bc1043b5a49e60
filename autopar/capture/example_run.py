"""A run of the forward on the example inputs, in which Python reads values: the notes of `branches.py`.

Where model and inputs have values they are computed, on the device of the model, without a trace of it afterwards:
buffers, attributes and random generators are as before. Where weights or inputs are on meta or fake, what follows
from the other inputs is computed all the same, and the rest comes from the notes of an earlier run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import FakeTensor
from autopar.capture.branches import Notes
from autopar.capture.fake import fake_parameters, fake_twin
from autopar.capture.inputs import FlatInputs, flatten_inputs
from autopar.capture.known_values import KnownValues
from autopar.capture.precision import canonical_names, precision_dtype
from autopar.capture.trace import traced_alike
from autopar.capture.training_step import BATCH, LossFunction, TrainingStep


def read_example(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: LossFunction | None,
    batch: Any,
    training: bool,
    precision: str | None,
    known: Notes,
) -> Notes:
    """What Python reads in a forward of `model` on these arguments. known: notes of earlier runs.

    Raises CaptureError where it reads what has no value, here or there."""
    with_batch = loss_fn is not None and batch is not None
    inputs = flatten_inputs(args, {**kwargs, BATCH: batch} if with_batch else kwargs)
    step = TrainingStep(
        model, inputs, loss_fn, with_batch, precision_dtype(precision), canonical_names(model), notes=known
    )
    with contextlib.ExitStack() as stack:
        tensors = _entered(stack, step, inputs)
        stack.enter_context(traced_alike(step, kwargs, training))
        step(*tensors)
    return step.found


def _entered(stack: contextlib.ExitStack, step: TrainingStep, inputs: FlatInputs) -> list[Tensor]:
    """The tensors on which the step runs, real ones where all are."""
    held = [*step.model.parameters(), *step.model.buffers()]
    if all(map(_has_values, (*held, *inputs.tensors))):
        device = held[0].device if held else torch.device("cpu")
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(_copied_buffers(step.model))
        return [tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad) for tensor in inputs.tensors]
    mode = KnownValues(allow_non_fake_inputs=True)
    stack.enter_context(fake_parameters(step, mode))
    return [mode.known(tensor) if _has_values(tensor) else fake_twin(tensor, mode) for tensor in inputs.tensors]


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def _copied_buffers(model: nn.Module) -> Iterator[None]:
    """Within the context buffers are copies, which a forward may change."""
    saved = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    copies = {id(buffer): buffer.clone() for buffer in model.buffers()}
    for buffers, original in saved:
        buffers.update({name: copies.get(id(buffer)) for name, buffer in original.items()})
    try:
        yield
    finally:
        for buffers, original in saved:
            buffers.update(original)

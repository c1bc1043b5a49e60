"""All captures of one model: traced for two sizes of a kind, computed for further ones (see `family.py`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar._compat import tree_leaves
from autopar.capture.branches import Notes
from autopar.capture.family import CallsAt, Family, family, input_shapes, varies
from autopar.capture.inputs import FlatInputs, find_batch_dims, flatten_inputs
from autopar.capture.python_state import PythonState, Read
from autopar.capture.trace import capture, forward_calls
from autopar.capture.training_step import BATCH, LossFunction
from autopar.errors import CaptureError
from autopar.program import Program

MOST_TRACED = 8
"""Programs of a kind that are kept to be compared with the next one, where no family computes it."""


class Captures:
    """Captures of one model. traces, computed: how many programs were traced, and how many computed."""

    def __init__(self) -> None:
        self._families: dict[Any, Family] = {}
        self._traced: dict[Any, list[Program]] = {}
        self._pairs: dict[Any, list[tuple[Program, Program]]] = {}
        self._reads: dict[Any, frozenset[Read]] = {}
        self.notes: Notes = {}
        """What Python read of values so far."""
        self.traces = 0
        self.computed = 0

    def capture(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        loss_fn: LossFunction | None,
        batch: Any,
        batch_dims: Mapping[str, int | None] | None,
        training: bool,
        precision: str | None,
        reduce_dtype: str | None = None,
        differentiable: Sequence[str] = (),
        notes: Notes | None = None,
    ) -> Program:
        """As `autopar.capture.capture`, from earlier captures of the model where they predict this one: not where
        Python reads values, which sizes do not predict."""
        beside = {BATCH: batch} if loss_fn is not None and batch is not None else {}
        inputs = flatten_inputs(args, {**kwargs, **beside})
        base = _kind(model, inputs, training)
        kind = self._in_state(base, model, loss_fn)
        calls = functools.partial(
            forward_calls, model, args, kwargs, loss_fn=loss_fn, batch=batch, training=training, precision=precision
        )
        try:
            known = None if notes else self._family(kind, calls)
            predicted = None if known is None else known.at([tuple(tensor.shape) for tensor in inputs.tensors], calls)
        except CaptureError:  # the forward of the model itself does not trace: see `fallback.py`
            predicted = None
        if predicted is not None:
            dims = find_batch_dims(inputs.tensor_names, inputs.tensors, batch_dims)
            if dims == tuple(e.batch_dim for e in predicted.inputs if e.role == "input"):
                self.computed += 1
                return predicted
        program = capture(
            model,
            args,
            kwargs,
            loss_fn=loss_fn,
            batch=batch,
            batch_dims=batch_dims,
            training=training,
            precision=precision,
            reduce_dtype=reduce_dtype,
            differentiable=differentiable,
            notes=notes,
        )
        self.traces += 1
        self._reads[base] = self._reads.get(base, frozenset()) | program.reads
        kind = self._in_state(base, model, loss_fn)
        if notes:
            return program
        traced = self._traced.setdefault(kind, [])
        if kind not in self._families:
            other = next((each for each in traced if varies(each, program)), None)
            self._pairs.setdefault(kind, []).extend([] if other is None else [(other, program)])
        traced.append(program)
        del traced[:-MOST_TRACED]
        return program

    def _in_state(self, base: Any, model: nn.Module, loss_fn: LossFunction | None) -> Any:
        """A kind with the values of what its captures read."""
        return base, PythonState(model, self._reads.get(base, frozenset()), loss_fn).digest()

    def _family(self, kind: Any, calls: CallsAt) -> Family | None:
        """What predicts further programs of a kind; two traced ones are compared when a third is asked for."""
        pairs = self._pairs.get(kind, [])
        while kind not in self._families and pairs:
            first, second = pairs.pop()
            found = family(first, second, (calls(input_shapes(first)), calls(input_shapes(second))))
            if found is not None:
                self._families[kind] = found
        return self._families.get(kind)


def _kind(model: nn.Module, inputs: FlatInputs, training: bool) -> Any:
    """All but the sizes and the Python state that decides over a graph: structure, dtypes, constants, modes, what is
    trained, autocast."""
    leaves = tuple(
        (leaf.dtype, leaf.dim(), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in tree_leaves(inputs.leaves)
    )
    modes = tuple(module.training for module in model.modules())
    trained = tuple(parameter.requires_grad for parameter in model.parameters())
    return (inputs.spec, leaves, training, modes, trained, autocast_state())


def autocast_state() -> tuple[Any, ...]:
    """Which dtype autocast gives on each device type now, None where it is off."""
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )

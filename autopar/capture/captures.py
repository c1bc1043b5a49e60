"""All captures of one model: traced for two sizes of a kind, computed for further ones (see `family.py`).

A loop may vary two sizes, the length and in its last batch the number of samples: whatever two of the traced programs
differ in one of them predict the others that differ from them in that one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar._compat import tree_leaves
from autopar.capture.branches import Notes
from autopar.capture.family import CallsAt, Family, family, input_shapes, predicts, varies
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
        self._families: dict[Any, list[Family]] = {}
        self._traced: dict[Any, list[tuple[int, Program]]] = {}
        self._compared: set[tuple[int, int]] = set()
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
            shapes = [tuple(tensor.shape) for tensor in inputs.tensors]
            known = None if notes else self._family(kind, shapes, calls)
            predicted = None if known is None else known.at(shapes, calls)
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
        traced.append((self.traces, program))
        del traced[:-MOST_TRACED]
        return program

    def _in_state(self, base: Any, model: nn.Module, loss_fn: LossFunction | None) -> Any:
        """A kind with the values of what its captures read."""
        return base, PythonState(model, self._reads.get(base, frozenset()), loss_fn).digest()

    def _family(self, kind: Any, shapes: Sequence[tuple[int, ...]], calls: CallsAt) -> Family | None:
        """What predicts a program of these shapes: two traced ones that differ in one size, as it differs from both."""
        families = self._families.setdefault(kind, [])
        known = next((each for each in families if predicts(each.first, each.second, shapes)), None)
        if known is not None:
            return known
        for (one, first), (two, second) in itertools.combinations(self._traced.get(kind, ()), 2):
            if (one, two) in self._compared or not varies(first, second) or not predicts(first, second, shapes):
                continue
            self._compared.add((one, two))
            found = family(first, second, (calls(input_shapes(first)), calls(input_shapes(second))))
            if found is not None:
                families.append(found)
                return found
        return None


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

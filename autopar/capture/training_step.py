"""One training step as a module: flat tensors in, flat tensors out, the loss found.

`TrainingStep` wraps the model and the loss function for the trace. Its forward takes the tensors among the user's
arguments (the others are constants) and returns the tensors among the outputs. The loss is what `loss_fn(output,
batch)` returns, else `output.loss` or `output["loss"]`, a 0-dim output, or a 0-dim first element of a tuple. With a
loss, gradients flow from it, from the other 0-dim outputs (further losses) and from what `differentiable` names; the
rest is detached. With a `dtype`, floating inputs and casts of the parameters are what the model computes with, and
losses are returned in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autopar._compat import TreeSpec, tree_flatten_with_path
from autopar.capture.branches import Branches, Notes
from autopar.capture.expert_loops import ExpertLoops
from autopar.capture.forward_state import ForwardState
from autopar.capture.huggingface import is_cache
from autopar.capture.inputs import FlatInputs, path_part, unflatten_inputs
from autopar.capture.interception import Interception
from autopar.capture.precision import computing_in, narrowed, widened
from autopar.capture.python_state import Read
from autopar.capture.read_numbers import plain
from autopar.capture.structures import register_structures
from autopar.capture.value_checks import PassedChecks
from autopar.errors import CaptureError, ConfigurationError
from autopar.program import Constant, Guard

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
BATCH = "batch"  # keyword under which a batch for the loss function travels beside the model's arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """names: of the returned tensors; loss: which of them is the loss; requires_grad: names of those that the model
    returns with a gradient; guards: of the last ones; leaves, spec: how to rebuild the output."""

    names: tuple[str, ...]
    loss: int | None
    requires_grad: tuple[str, ...]
    guards: tuple[Guard, ...]
    leaves: tuple[int | Constant, ...]
    spec: TreeSpec


class TrainingStep(nn.Module):
    """Model and loss as one module. After a forward, `outputs` says what the returned tensors are, and `found` which
    values Python read; after a trace, `reads` which attributes it read. notes: where Python may read values, what it
    gets (see `branches.py`)."""

    outputs: StepOutputs

    def __init__(
        self,
        model: nn.Module,
        inputs: FlatInputs,
        loss_fn: LossFunction | None,
        with_batch: bool,
        dtype: torch.dtype | None = None,
        canonical: Mapping[str, str] | None = None,
        differentiable: Sequence[str] = (),
        notes: Notes | None = None,
    ) -> None:
        super().__init__()
        self._given = (model, inputs, loss_fn, with_batch, dtype, canonical, differentiable, notes)
        self.model = model
        self._inputs = inputs
        self._loss_fn = loss_fn
        self._with_batch = with_batch
        self._dtype = dtype
        self._canonical = canonical or {}
        self._differentiable = differentiable
        self._notes = notes
        self.found: Notes = {}
        self.state = ForwardState(model, loss_fn)
        self.reads: set[Read] = set()
        self._trained: set[str] = set()
        """Outputs with a gradient in some run: tracing may run the forward once more, without any."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The loss, outputs and changed buffers of one step, as the trace wants them."""
        leaves = list(self._inputs.leaves)
        for index, tensor in zip(self._inputs.tensor_leaves, tensors, strict=True):
            leaves[index] = narrowed(tensor, self._dtype)
        args, kwargs = unflatten_inputs(self._inputs.spec, leaves)
        batch = kwargs.pop(BATCH) if self._with_batch else (kwargs or args)
        branches = None if self._notes is None else Branches(self._notes)
        with (
            self.state.running(),
            branches or contextlib.nullcontext(),
            PassedChecks(),
            Interception(),
            ExpertLoops(),
            computing_in(self.model, self._dtype, self._canonical),
        ):
            output = self.model(*args, **kwargs)
            if self._loss_fn is not None:
                output = self._loss_fn(output, batch)
                _check_loss(output, "loss_fn")
        return self._flatten(output, tensors, branches, keeps_cache=bool(kwargs.get("use_cache")))

    def again(self) -> TrainingStep:
        """Another step of the same model, of which nothing has run."""
        return TrainingStep(*self._given)

    @property
    def takes_branches(self) -> bool:
        """Whether Python may read values."""
        return self._notes is not None

    def _flatten(
        self, output: Any, tensors: tuple[Tensor, ...], branches: Branches | None, *, keeps_cache: bool
    ) -> tuple[Tensor, ...]:
        loss = find_loss(output)
        register_structures(output, "the output")
        paths, spec = tree_flatten_with_path(output)
        returned: list[Tensor] = []
        names: list[str] = []
        leaves: list[int | Constant] = []
        loss_index = None
        for path, leaf in paths:
            if isinstance(leaf, Tensor):
                name = ".".join(map(path_part, path)) or ("loss" if leaf is loss else "output")
                if leaf is loss:
                    loss_index = len(returned)
                if leaf.requires_grad:
                    self._trained.add(name)
                leaves.append(len(returned))
                returned.append(self._returned(leaf, name, loss))
                names.append(name)
            else:
                leaves.append(Constant(None) if is_cache(leaf) and not keeps_cache else _constant(path, leaf))
        if not returned:
            raise CaptureError("the model returns no tensor, so there is nothing to compute")
        _check_named(self._differentiable, names)
        guards = [] if branches is None else branches.guards()
        self.found = {} if branches is None else branches.found
        names += [guard.name for guard, _ in guards]
        self.outputs = StepOutputs(
            names=tuple(names),
            loss=loss_index,
            requires_grad=tuple(name for name in names if name in self._trained),
            guards=tuple(guard for guard, _ in guards),
            leaves=tuple(leaves),
            spec=spec,
        )
        return self._separate([*returned, *(tensor for _, tensor in guards)], tensors)

    def _returned(self, leaf: Tensor, name: str, loss: Tensor | None) -> Tensor:
        if leaf is loss or _is_scalar(leaf):
            wide: Tensor = leaf if self._dtype is None else widened(leaf)
            return wide
        kept = loss is None or any(_is_part(name, given) for given in self._differentiable)
        return leaf if kept else leaf.detach()

    def _separate(self, returned: list[Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Clone outputs that share memory with an input, a parameter or an earlier output."""
        taken = {_storage(t) for t in (*tensors, *self.parameters(), *self.buffers())}
        separate = []
        for tensor in returned:
            separate.append(tensor.clone() if _storage(tensor) in taken else tensor)
            taken.add(_storage(tensor))
        return tuple(separate)


def find_loss(output: Any) -> Tensor | None:
    """The scalar loss among a model's outputs, if there is one. Raises CaptureError when `.loss` is no scalar."""
    candidate = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(candidate, Tensor):
        _check_loss(candidate, "the model's output `loss`")
        return candidate
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, Tensor) and _is_scalar(first) else None


def _is_scalar(leaf: Tensor) -> bool:
    return leaf.dim() == 0 and leaf.is_floating_point()


def _is_part(name: str, given: str) -> bool:
    """Whether an output is what the user named, or lies in it: "hidden_states.2" in "hidden_states"."""
    return name == given or name.startswith(f"{given}.")


def _check_named(differentiable: Sequence[str], names: Sequence[str]) -> None:
    unknown = [given for given in differentiable if not any(_is_part(name, given) for name in names)]
    if unknown:
        raise ConfigurationError(f"differentiable names {unknown}, but the outputs are {list(names)}")


def _check_loss(loss: Any, where: str) -> None:
    if not isinstance(loss, Tensor):
        raise CaptureError(f"{where} returned {type(loss).__name__}, not a tensor; return a 0-dim tensor")
    if loss.dim() != 0:
        raise CaptureError(
            f"{where} has shape {tuple(loss.shape)}; a loss must be a scalar: reduce it with .mean() or .sum()"
        )


def _constant(path: Any, leaf: Any) -> Constant:
    if leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
        return Constant(plain(leaf))
    where = ".".join(map(path_part, path)) or "output"
    raise CaptureError(
        f"output {where} is a {type(leaf).__name__}, which torch's pytrees do not know: return tensors, tuples, "
        "dicts, or register it with torch.utils._pytree.register_dataclass"
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

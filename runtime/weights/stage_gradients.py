"""Gradients whose norm must not be taken for that of the model: on a rank of a pipeline, and in logical shards, where
torch would add up in an order that depends on the blocks of the ranks.

    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)     GradientError: this rank has its own stages only
    autopar.clip_grad_norm_(module.parameters(), 1.0)            counts all stages

torch joins the norms of single gradients by `torch.stack`. So a `.grad` is a DTensor that knows where it belongs, its
norm is one too, and stacking such norms is refused. All else meets a plain DTensor. So does a whole step of an
optimizer, of which some compile their updates: programs that torch compiles keep to the class of what they were given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar._compat import dtensor, without_torch_function
from autopar.errors import GradientError

OF_A_PIPELINE = (
    "this joins the norms of the gradients that one rank of a pipeline holds, those of its own stages: call "
    "autopar.clip_grad_norm_(module.parameters(), max_norm), which counts all stages"
)
OF_SHARDS = (
    "this joins norms of gradients whose bits are equal on any number of processes (deterministic=), in an order that "
    "depends on that number: call autopar.clip_grad_norm_(module.parameters(), max_norm), which adds up exactly"
)
_REFUSAL = "autopar_refusal"
_NORMS = (torch.linalg.vector_norm, torch.norm, torch.Tensor.norm, torch._foreach_norm, torch.Tensor.to)
"""What a norm of a gradient comes from, on the way into a stack."""


class StageGradient(DTensor):
    """The gradient of a parameter of some stages, or a norm of one.

    plain: the same blocks as a DTensor, which torch's operators take on their short way: AdamW over 150 parameters
    takes 34 ms with DTensors, 40 so, and 46 without it (one core of an EPYC).
    """

    plain: DTensor
    refusal: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.stack and all(norm.dim() == 0 for norm in args[0]):
            raise GradientError(_refusal(args[0]))
        with without_torch_function():
            if func is torch.Tensor.grad.__set__:  # type: ignore[union-attr]
                return func(*args)
            found = func(*map(_plain, args), **{name: _plain(value) for name, value in (kwargs or {}).items()})
        if func not in _NORMS:
            return found
        why = _refusal(args)
        return [of_stage(norm, why) for norm in found] if isinstance(found, (list, tuple)) else of_stage(found, why)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = of_stage(self.plain.clone(), self.refusal)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold a DTensor."""
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.plain if isinstance(value, StageGradient) else value


def _refusal(value: Any) -> str:
    """That of the first gradient in it; "" where there is none."""
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_refusal, value)), "")
    return value.refusal if isinstance(value, StageGradient) else ""


def of_stage(tensor: torch.Tensor, refusal: str = OF_A_PIPELINE) -> torch.Tensor:
    """A DTensor as a `StageGradient`; other tensors, and what is differentiated again, as they are. refusal: why norms
    are not joined."""
    if type(tensor) is not DTensor or tensor.requires_grad:
        return tensor
    made = StageGradient(tensor._local_tensor, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    made.plain, made.refusal = dtensor(tensor._local_tensor, tensor._spec), refusal
    return made


def mark_gradients(model: nn.Module, refusal: str) -> None:
    """From now on a gradient that backward leaves at a parameter of `model` is a `StageGradient`; none is, where
    there is no reason to refuse (""), as behind a change of plans."""
    for parameter in model.parameters():
        is_watched = hasattr(parameter, _REFUSAL)
        if parameter.requires_grad and (refusal or is_watched):
            setattr(parameter, _REFUSAL, refusal)
            if not is_watched:
                parameter.register_post_accumulate_grad_hook(_mark)  # type: ignore[no-untyped-call]
            _mark(parameter)
    _watch_optimizers()


def _mark(parameter: torch.Tensor) -> None:
    refusal = getattr(parameter, _REFUSAL, "")
    if parameter.grad is not None and refusal:
        parameter.grad = of_stage(parameter.grad, refusal)


@functools.cache
def _watch_optimizers() -> None:
    """Once per process."""
    register_optimizer_step_pre_hook(_give_plain)
    register_optimizer_step_post_hook(_mark_again)


def _give_plain(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in _marked(optimizer):
        parameter.grad = _plain(parameter.grad)


def _mark_again(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in _marked(optimizer):
        _mark(parameter)


def _marked(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if getattr(parameter, _REFUSAL, ""))

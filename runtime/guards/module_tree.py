"""Module tree: what a compiled module is made of must be what was compiled.

    module.act = nn.GELU()                  another submodule without weights: captured again
    module.get_buffer("mean").zero_()       values may change
    module.head = nn.Linear(8, 4)           a parameter that no plan has sharded: ConfigurationError with its name
    module.half()                           another dtype than that of the graphs: ConfigurationError

A call compares identities, dtypes and devices, in microseconds; only where one differs the tree is walked.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import ConfigurationError

_AGAIN = "or change the model before autopar.compile and compile it again"


class ModuleTree:
    """The tree of a sharded model as it was last found right."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._take()

    def _take(self) -> None:
        modules = list(self._model.modules())
        self._modules = [vars(module) for module in modules]
        self._dicts = [d for own in self._modules for d in (own["_modules"], own["_parameters"], own["_buffers"])]
        self._entries = self._now()
        self._tensors = dict(_tensors(self._model))
        self._parameters = list({id(p): p for p in self._tensors.values() if isinstance(p, nn.Parameter)}.values())
        self._forms = self._forms_now()

    def _now(self) -> list[Any]:
        return list(chain.from_iterable([d.values() for d in self._dicts]))

    def _forms_now(self) -> list[Any]:
        return [(p.dtype, p.device) for p in self._parameters]

    def modes(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """training of every submodule, requires_grad of every parameter."""
        return (
            tuple([own["training"] for own in self._modules]),
            tuple([parameter.requires_grad for parameter in self._parameters]),
        )

    def changed(self) -> bool:
        """Whether a submodule or tensor is another one than when this was last asked.

        Raises ConfigurationError for tensors that no graph of the module can take.
        """
        now = self._now()
        same = len(now) == len(self._entries) and all(map(is_, now, self._entries))
        if same and self._forms_now() == self._forms:
            return False
        self._check()
        self._take()
        return True

    def _check(self) -> None:
        found = dict(_tensors(self._model))
        for name in [name for name in found if name not in self._tensors]:
            raise ConfigurationError(
                f"{_kind(found[name])} {name} was added after autopar.compile, so no plan says where it lies: add it "
                f"before, {_AGAIN}"
            )
        for name in [name for name in self._tensors if name not in found]:
            raise ConfigurationError(
                f"{_kind(self._tensors[name])} {name} was removed after autopar.compile: put it back, {_AGAIN}"
            )
        forms = dict(zip(map(id, self._parameters), self._forms, strict=True))
        for name, new in found.items():
            old = self._tensors[name]
            dtype, device = forms.get(id(old), (old.dtype, old.device))
            if _form(new) != (old.shape, dtype, device, *_form(old)[3:]):
                swapped = isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter)
                how = " and no nn.Parameter, as under torch.func.functional_call" if swapped else ""
                raise ConfigurationError(
                    f"{_kind(old)} {name} is {_described(new)} now{how}, the module was compiled with "
                    f"{_described(old, dtype, device)}: write values in place "
                    f"(with torch.no_grad(): parameter.copy_(values)), pass full tensors to load_state_dict, {_AGAIN}"
                )


def _tensors(model: nn.Module) -> chain[tuple[str, Tensor]]:
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _kind(tensor: Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _form(tensor: Tensor) -> tuple[Any, ...]:
    form = (tensor.shape, tensor.dtype, tensor.device, isinstance(tensor, nn.Parameter))
    return (*form, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else form


def _described(tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> str:
    layout = ", ".join(map(str, tensor.placements)) if isinstance(tensor, DTensor) else "not sharded"
    return f"{dtype or tensor.dtype} {tuple(tensor.shape)} on {device or tensor.device} ({layout})"


def refuse_conversion(model: nn.Module, convert: Any) -> None:
    """`convert`: what `.to()`, `.half()` and their like do to each tensor. Raises ConfigurationError where it gives a
    tensor of the model another dtype or device."""
    for name, tensor in _tensors(model):
        probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        new = convert(probe)
        if (new.dtype, new.device) != (probe.dtype, probe.device):
            raise ConfigurationError(
                f"{_kind(tensor)} {name} of a compiled module stays {tensor.dtype} on {tensor.device}, as its graphs "
                f"have it, and cannot become {new.dtype} on {new.device}: convert the model before autopar.compile; "
                'compile(..., precision="bf16") computes in bf16 from fp32 parameters'
            )

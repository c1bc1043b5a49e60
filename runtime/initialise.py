"""Initialise: a model on the meta device -> initialised weights, one module at a time.

    for each submodule with meta tensors: allocate it, call its reset_parameters() (or the model's _init_weights),
    hand its tensors to `keep` (which shards them), free the rest

Every rank draws the same full tensors from one seed, so ranks agree without communication, and at no time is more
than one submodule whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autopar.errors import ConfigurationError

Keep = Callable[[nn.Module], None]

_INITIALISERS = ("reset_parameters", "_reset_parameters", "init_weights")


def has_meta_tensors(module: nn.Module, *, recurse: bool = True) -> bool:
    """Whether a parameter or buffer of the module has no data."""
    tensors = (*module.parameters(recurse=recurse), *module.buffers(recurse=recurse))
    return any(tensor.is_meta for tensor in tensors)


def initialise(model: nn.Module, keep: Keep, device: torch.device, seed: int) -> None:
    """Give every submodule of `model` that is on meta its initial weights on `device`, then call `keep(submodule)`.

    Raises ConfigurationError naming a submodule that does not know how to initialise itself.
    """
    of_model = getattr(model, "_init_weights", None)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, module in model.named_modules():
            if has_meta_tensors(module, recurse=False):
                _allocate(module, device)
                _initialise_one(name, module, of_model)
                keep(module)


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Uninitialised memory in place of the meta tensors of this module alone; tied parameters stay tied."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_meta:
            parameter.data = torch.empty_like(parameter, device=device)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.zeros_like(buffer, device=device)


def _initialise_one(name: str, module: nn.Module, of_model: Callable[[nn.Module], None] | None) -> None:
    if of_model is not None:
        of_model(module)
        return
    for initialiser in _INITIALISERS:
        if hasattr(module, initialiser):
            getattr(module, initialiser)()
            return
    raise ConfigurationError(
        f"submodule {name or type(module).__name__} ({type(module).__name__}) is on the meta device and has none of "
        f"{', '.join(_INITIALISERS)}: define reset_parameters(), or build the model with its weights"
    )

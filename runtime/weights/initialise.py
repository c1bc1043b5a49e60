"""Initialise: a model on the meta device -> initialised weights, one unit at a time.

    for each unit (an element of a ModuleList, or a submodule outside of one):
        allocate it, call reset_parameters() of its submodules (or the model's _init_weights), shard it, free the rest

Every rank draws the same full tensors from one seed, so ranks agree without communication, and at no time is more
than one unit whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from autopar.errors import ConfigurationError
from autopar.runtime.parameters import set_parameter, unique_parameters

Shard = Callable[[nn.Parameter, Sequence[str]], nn.Parameter]

_INITIALISERS = ("reset_parameters", "_reset_parameters", "init_weights")


def is_on_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer has no data."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def initialise(model: nn.Module, shard: Shard, device: torch.device, seed: int) -> dict[int, nn.Parameter]:
    """Give every part of `model` that is on meta its initial weights; returns id(meta parameter) -> new parameter.

    shard: (full parameter, its names) -> the parameter to keep in its place. Raises ConfigurationError naming a
    submodule that does not know how to initialise itself.
    """
    aliases = {id(parameter): names for parameter, names in unique_parameters(model).values()}
    replaced: dict[int, nn.Parameter] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for prefix, unit in _units(model, ""):
            allocated = _allocate(model, unit, aliases, device)
            _initialise_unit(model, prefix, unit, recurse=not _is_open(unit, replaced))
            for old, (parameter, names) in allocated.items():
                replaced[old] = new = shard(parameter, names)
                for name in names:
                    set_parameter(model, name, new)
    return replaced


def _units(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Elements of the outermost ModuleLists and Sequentials, leaves outside of them, and containers for themselves."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_list or not any(True for _ in child.children()):
            yield path, child
        else:
            yield from _units(child, f"{path}.")
    yield prefix.rstrip("."), module


def _is_open(unit: nn.Module, replaced: Mapping[int, nn.Parameter]) -> bool:
    """A container whose children were units already: all their parameters are sharded by now."""
    done = {id(parameter) for parameter in replaced.values()}
    return any(id(parameter) in done for parameter in unit.parameters())


def _allocate(
    model: nn.Module, unit: nn.Module, aliases: Mapping[int, Sequence[str]], device: torch.device
) -> dict[int, tuple[nn.Parameter, Sequence[str]]]:
    """Uninitialised memory in place of the meta tensors of a unit; tied parameters stay tied."""
    allocated = {}
    for meta in [parameter for parameter in unit.parameters() if parameter.is_meta and id(parameter) in aliases]:
        new = nn.Parameter(torch.empty_like(meta, device=device), requires_grad=meta.requires_grad)
        allocated[id(meta)] = (new, aliases[id(meta)])
        for name in aliases[id(meta)]:
            set_parameter(model, name, new)
    for module in unit.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    return allocated


def _initialise_unit(model: nn.Module, prefix: str, unit: nn.Module, *, recurse: bool) -> None:
    """Children before parents, so that a block may rescale what its layers drew."""
    of_model = getattr(model, "_init_weights", None)
    for name, child in unit.named_children() if recurse else ():
        _initialise_unit(model, f"{prefix}.{name}", child, recurse=True)
    own = [tensor for tensor in (*unit._parameters.values(), *unit._buffers.values()) if tensor is not None]
    if of_model is not None:
        if recurse or own:
            of_model(unit)
        return
    initialiser = next((name for name in _INITIALISERS if hasattr(unit, name)), None)
    if initialiser is not None and own:
        getattr(unit, initialiser)()
    elif own and initialiser is None:
        raise ConfigurationError(
            f"submodule {prefix or type(unit).__name__} ({type(unit).__name__}) is on the meta device and has none of "
            f"{', '.join(_INITIALISERS)}: define reset_parameters(), or build the model with its weights"
        )

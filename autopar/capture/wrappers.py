"""Take off what others wrapped around a module: autopar plans, shards and compiles the module itself.

    DataParallel(net), DistributedDataParallel(net), torch.compile(net)   -->   net
    net.layers[0] = torch.compile(net.layers[0])                          -->   net.layers[0]

Parameters then have the names of the plain model, without `module.` and `_orig_mod.`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar._compat import is_compiled
from autopar.errors import ConfigurationError


def inner_module(module: nn.Module) -> nn.Module:
    """The module inside its wrappers. Raises ConfigurationError for a module that FSDP has sharded."""
    while True:
        if is_compiled(module):
            module = module.get_submodule("_orig_mod")
        elif isinstance(module, (DataParallel, DistributedDataParallel)):
            module = module.module
        elif isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            raise ConfigurationError(
                f"{type(module).__name__} is sharded by FSDP already: pass the model from before fully_shard, the plan "
                "decides how parameters are split"
            )
        else:
            return module


def take_off_wrappers(model: nn.Module) -> nn.Module:
    """`model` without wrappers, those of its submodules replaced in place."""
    model = inner_module(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            inner = inner_module(child)
            if inner is not child:
                parent._modules[name] = inner
                take_off_wrappers(inner)
    return model


@contextlib.contextmanager
def without_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Within the context `model` has no wrappers, nor have its submodules; then all are put back."""
    model = inner_module(model)
    children = {module: dict(module._modules) for module in model.modules()}
    try:
        yield take_off_wrappers(model)
    finally:
        for module, before in children.items():
            module._modules.update(before)

"""Held model: a module whose tree, mode and attributes are those of another one, the original.

    module.alpha = 2        the original's alpha, which its forward reads
    module.eval()           the original's mode, and that of its submodules
    module.plan             an attribute of the class that holds; a submodule of this name is module.original.plan
    module.half()           ConfigurationError, as pickling and copying

So nothing is set where no forward looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar._compat import STATES_OF_WRAPPERS
from autopar.errors import ConfigurationError
from autopar.runtime.guards.module_tree import ModuleTree, refuse_conversion
from autopar.runtime.guards.wrapped_again import WrapperStates, refuse_wrapper, say_compiled


class HeldModel(nn.Module):
    """See the module docstring. Attributes of a subclass are made before `_hold`."""

    _model: tuple[nn.Module]
    _tree: ModuleTree | None
    """None while the parameters are still the original's."""

    def _hold(self, model: nn.Module) -> None:
        """From now on `model` is the original; once more behind a change of its dicts."""
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, vars(model)[name])
        vars(self)[STATES_OF_WRAPPERS] = WrapperStates()
        object.__setattr__(self, "_model", (model,))  # a tuple, so that it is not a submodule of its own tree

    @property
    def original(self) -> nn.Module:
        """The module that was compiled; it shares its tree, so its parameters are this module's."""
        return self._model[0]

    @property
    def training(self) -> bool:
        """That of the original, which its forward reads."""
        return self._model[0].training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in vars(self):
            self._model[0].training = mode

    def __getattr__(self, name: str) -> Any:
        if "_model" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} yet")
        found = getattr(self._model[0], name)
        return self._method(name) if getattr(found, "__self__", None) is self._model[0] else found

    def _method(self, name: str) -> Any:
        """What stands for a method of the original."""
        raise AttributeError(
            f"{name}() is a method of the original model, which runs on one process and not under the plan: call it on "
            f"a copy with whole weights, module.plain_model().{name}(), or module.original.{name}() where it needs none"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if "_model" not in vars(self):
            object.__setattr__(self, name, value)
        elif name not in vars(self) and not hasattr(type(self), name):
            setattr(self._model[0], name, value)
        elif isinstance(value, (nn.Module, torch.Tensor)):
            raise ConfigurationError(f"the compiled module has a {name} of its own: write module.original.{name} = ...")
        else:
            object.__setattr__(self, name, value)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """DistributedDataParallel asks for it before anything else. Raises ConfigurationError."""
        refuse_wrapper("DistributedDataParallel")

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """FullyShardedDataParallel sets it before it shards anything. Setting it raises ConfigurationError."""
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, _: bool) -> None:
        refuse_wrapper("FullyShardedDataParallel")

    def compile(self, *_: Any, **__: Any) -> None:
        """Nothing: the graphs are captured, and the plan says which kernels run them."""
        say_compiled()

    @property
    def _initialize_hook(self) -> Any:
        """torch.compile asks for it last, of lazy modules; this is none."""
        say_compiled()
        raise AttributeError("_initialize_hook")

    def get_submodule(self, target: str) -> nn.Module:
        """As of nn.Module, also where it has the name of an attribute of this class."""
        return self.original.get_submodule(target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        """As of nn.Module, also where it has the name of an attribute of this class."""
        return self.original.get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """As of nn.Module, also where it has the name of an attribute of this class."""
        return self.original.get_buffer(target)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`.to()`, `.half()`, `.cuda()` and their like. Raises ConfigurationError where they would change a tensor."""
        if self._tree is None:
            self.original._apply(fn, recurse)  # type: ignore[no-untyped-call]
        else:
            refuse_conversion(self.original, fn)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "a compiled module can be neither pickled nor copied: its parameters lie across processes. Save it with "
            "autopar.save(path, module) or its module.state_dict(); copy the model before autopar.compile, or take "
            "module.plain_model(), a copy with whole weights"
        )

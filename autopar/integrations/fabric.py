"""Fabric: a strategy of Lightning Fabric under which `fabric.setup` compiles.

    fabric = Fabric(strategy=AutoparFabricStrategy(), devices=2)            # the changed line
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)                               # whole batches, on every rank
    fabric.backward(model(**batch).loss)

`fabric.save("run.ckpt", state)` writes the whole weights into the file, and `run.autopar/` beside it, from which
`fabric.load` goes on, also under another plan and number of processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autopar.errors import ConfigurationError
from autopar.integrations.absent_package import absent
from autopar.integrations.prepared_module import compiled_in, prepared, trainer_of, when_planned
from autopar.integrations.states import folder_beside, whole_state
from autopar.integrations.whole_batches import example_of, whole_loader
from autopar.runtime.checkpoints.checkpoint import load, save
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.weights.clip_grad import clip_grad_norm_

try:
    from lightning.fabric.plugins import MixedPrecision, Precision
    from lightning.fabric.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise absent("lightning", "lightning") from error

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def compiled_precision(name: str) -> str | None:
    """What `compile(precision=)` is for a precision of Lightning. Raises ConfigurationError for fp16 and fp8."""
    if name not in ("32-true", "64-true", "bf16-true", "bf16-mixed"):
        raise ConfigurationError(
            f'precision="{name}": in Lightning a compiled module computes in fp32, fp64 or bf16, so pass "bf16-mixed" '
            'or "bf16-true"; a plain loop takes precision="fp16" and a GradScaler'
        )
    return "bf16" if name == "bf16-mixed" else None


class AutoparFabricStrategy(DDPStrategy):
    """See the module docstring. autopar: arguments of `autopar.compile` by name; the rest is of its DDPStrategy."""

    def __init__(self, *args: Any, autopar: Mapping[str, Any] = _NOTHING, **kwargs: Any) -> None:
        self._autopar = dict(autopar)
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()
        self._example: Any = None

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None: every rank reads the whole batch."""
        return None

    @property
    def precision(self) -> Any:
        """That of Fabric, without autocast: the casts of mixed precision are part of the compiled graph."""
        return Precision() if isinstance(self._precision, MixedPrecision) else self._precision or Precision()

    @precision.setter
    def precision(self, precision: Any) -> None:
        self._precision = precision

    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """A loader whose batches are those of all processes together."""
        whole = whole_loader(dataloader, self.world_size)
        if self._example is None:
            self._example = example_of(whole)
        return whole

    def setup_module(self, module: nn.Module) -> nn.Module:
        """The compiled module, without an optimizer."""
        return self._compiled(module, None)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        """The compiled module; the optimizer has its parameters."""
        if len(optimizers) > 1:
            raise ConfigurationError(
                f"fabric.setup was given {len(optimizers)} optimizers, a compiled module has one: give one optimizer "
                "groups of parameters"
            )
        return self._compiled(module, optimizers[0]), optimizers, scheduler

    def _compiled(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> ParallelModule:
        given = compiled_precision("32-true" if self._precision is None else self._precision.precision)
        options = {**({"precision": given} if given else {}), **self._autopar}
        return prepared(module, optimizer, options, self._example)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """`autopar.clip_grad_norm_`."""
        norm = clip_grad_norm_(module.parameters(), max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {float(norm)}: pass error_if_nonfinite=False to go on")
        return norm

    # checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole plain tensors on the host."""
        found = compiled_in(module)
        return super().get_module_state_dict(module) if found is None else whole_state(found)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: it lies beside the file, in blocks."""
        return {}

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """The file as of Fabric, with whole weights; beside it weights and optimizer by `autopar.save`."""
        super().save_checkpoint(path, state, storage_options, filter)
        for number, (module, optimizer) in enumerate(_pairs(state)):
            save(folder_beside(path, number), module, optimizer)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None) -> Any:
        """What `save_checkpoint` wrote; a compiled module that is not planned yet takes it at its first call."""
        if not isinstance(state, dict) or not _pairs(state):
            return super().load_checkpoint(path, state, strict, weights_only)
        held = {name: value for name, value in state.items() if _is_held(value)}
        plain = {name: value for name, value in state.items() if name not in held}
        rest = super().load_checkpoint(path, plain or None, strict, weights_only)
        state.update(plain)
        for number, (module, optimizer) in enumerate(_pairs(held)):
            when_planned(module, partial(load, folder_beside(path, number), module, optimizer))
        return {name: value for name, value in rest.items() if name not in held}


def _is_held(value: Any) -> bool:
    return isinstance(value, (ParallelModule, torch.optim.Optimizer))


def _pairs(state: Mapping[str, Any]) -> list[tuple[ParallelModule, torch.optim.Optimizer | None]]:
    """The compiled modules of a state, each with the optimizer that trains it."""
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    modules = [value for value in state.values() if isinstance(value, ParallelModule)]
    return [(module, trainer_of(module, optimizers)) for module in modules]


class _NoSync:
    """Of Fabric's `no_backward_sync`: the module's own `no_sync`."""

    @contextlib.contextmanager
    def no_backward_sync(self, module: Any, enabled: bool) -> Iterator[None]:
        found = compiled_in(module)
        with found.no_sync() if enabled and found is not None else contextlib.nullcontext():
            yield

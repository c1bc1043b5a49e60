"""Accelerate: its `Accelerator`, with models that autopar compiles where it would wrap them.

    from autopar.integrations.accelerate import Accelerator                 # the changed line
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:                                                    # the whole batch, on every rank
        accelerator.backward(model(**batch).loss)

`prepare` plans for the first batch of the first loader that it was given, where that is a dict; else the first call
plans. The batch of a step is that of Accelerate: the loader's times the number of processes, or the loader's own with
`split_batches`. Every rank has all of it, so `gather_for_metrics` returns what it is given, as whole plain tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autopar._compat import tree_map_only
from autopar.errors import ConfigurationError
from autopar.integrations.absent_package import absent
from autopar.integrations.prepared_module import compiled_in, is_output, plain, prepared, trainer_of, when_planned
from autopar.integrations.states import folder_in, whole_state
from autopar.integrations.whole_batches import example_of, is_keywords, whole_loader
from autopar.runtime.checkpoints.checkpoint import load, save
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.weights.clip_grad import clip_grad_norm_

try:
    import accelerate
    from accelerate.data_loader import prepare_data_loader
except ModuleNotFoundError as error:
    raise absent("accelerate", "accelerate") from error

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_PRECISIONS = {"no": None, "bf16": "bf16"}
_OWN_PROCESSES = ("NO", "MULTI_CPU", "MULTI_GPU")


class Accelerator(accelerate.Accelerator):
    """See the module docstring. autopar: arguments of `autopar.compile` by name, such as {"dims": {"tp": 2}}; example:
    the keywords for which the next model is planned, where a loader gave some.

    Raises ConfigurationError for what lays a model out in another way (FSDP, DeepSpeed, Megatron-LM, a
    ParallelismConfig), and for fp16 and fp8."""

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, autopar: Mapping[str, Any] = _NOTHING, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._autopar = dict(autopar)
        self.example: Any = None
        self._check_settings()
        if _PRECISIONS[self.mixed_precision] is not None:
            self._autopar.setdefault("precision", _PRECISIONS[self.mixed_precision])

    def _check_settings(self) -> None:
        kind = "FSDP" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else self.distributed_type.value
        if kind not in _OWN_PROCESSES or self.parallelism_config is not None:
            what = "a ParallelismConfig" if kind in _OWN_PROCESSES else kind
            raise ConfigurationError(
                f"this Accelerator was given {what}, which lays the model out itself: leave it out, and ask for a mesh "
                'with Accelerator(autopar={"dims": {"dp_shard": 4, "tp": 2}}), or for none, and one is chosen'
            )
        if self.mixed_precision not in _PRECISIONS:
            raise ConfigurationError(
                f'mixed_precision="{self.mixed_precision}": with Accelerate a compiled module computes '
                'in fp32 or bf16, so pass "bf16"; a plain loop takes precision="fp16" and a GradScaler'
            )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise ConfigurationError(
                f"this Accelerator was given torch.compile (backend {self.state.dynamo_plugin.backend.value}): a "
                "compiled module is not compiled again, so leave the backend out"
            )

    # preparing

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As of Accelerate; loaders first, since the model is planned for their batches."""
        ready = [self.prepare_data_loader(each) if isinstance(each, DataLoader) else each for each in args]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if len(optimizers) > 1:
            raise ConfigurationError(
                f"prepare was given {len(optimizers)} optimizers, a compiled module has one: give one optimizer groups "
                "of parameters, or call prepare once for each model with its optimizer"
            )
        given = getattr(optimizers[0], "optimizer", optimizers[0]) if optimizers else None
        ready = [self._compiled(each, given) if isinstance(each, nn.Module) else each for each in ready]
        return super().prepare(*ready, device_placement=device_placement)

    def _compiled(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ParallelModule:
        if self.device_placement and not isinstance(model, ParallelModule):
            model = model.to(self.device)
        return prepared(model, optimizer, self._autopar, self.example)

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """The compiled module; without an optimizer where it comes alone."""
        module = self._compiled(model, None)
        if not any(each is module for each in self._models):
            self._models.append(module)
        return module

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader whose batches are those of all processes together."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            if not any(each is data_loader for each in self._dataloaders):
                self._dataloaders.append(data_loader)
            return data_loader
        ready = prepare_data_loader(
            whole_loader(data_loader, 1 if self.split_batches else self.num_processes),
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=None,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        ready._is_accelerate_prepared = True
        self._dataloaders.append(ready)
        if self.example is None:
            batch = example_of(ready.base_dataloader)
            self.example = dict(batch) if is_keywords(batch) else None
        return ready

    # the loop

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """`autopar.clip_grad_norm_`."""
        return clip_grad_norm_(parameters, max_norm, norm_type)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Nothing: the casts of mixed precision are part of the compiled graph."""
        yield

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Outputs and labels of the whole batch, as plain tensors: every rank has them already."""
        return plain(input_data)

    def gather(self, tensor: Any) -> Any:
        """As of Accelerate for values that each process has of its own; outputs of the module are whole already."""
        gathered = super().gather
        return tree_map_only(torch.Tensor, lambda each: plain(each) if is_output(each) else gathered(each), tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Outputs as whole plain tensors; other tensors as of Accelerate."""
        return super().pad_across_processes(plain(tensor), dim, pad_index, pad_first)

    # the model behind it

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The original model, which shares the parameters."""
        found = compiled_in(model)
        if found is not None:
            return found.original
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole plain tensors on the host, on every rank; every rank calls it."""
        found = compiled_in(model) or self._module_of(model)
        if found is not None:
            return whole_state(found)
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        return state

    def _module_of(self, model: nn.Module) -> ParallelModule | None:
        return next((each for each in self._compiled_models() if each.original is model), None)

    def _compiled_models(self) -> list[ParallelModule]:
        return [each for each in self._models if isinstance(each, ParallelModule)]

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As of Accelerate; weights and optimizer by `autopar.save` in the folder's `autopar`."""
        with self._without_modules() as pairs:
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, (module, optimizer) in enumerate(pairs):
            save(folder_in(folder, number), module, optimizer)
        return folder

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """What `save_state` wrote, under this plan and on so many processes as there are now."""
        found: list[str] = []
        handle = self.register_load_state_pre_hook(lambda _, folder: found.append(folder))
        try:
            with self._without_modules() as pairs:
                super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            handle.remove()
        for number, (module, optimizer) in enumerate(pairs):
            when_planned(module, partial(load, folder_in(Path(found[0]), number), module, optimizer))

    @contextlib.contextmanager
    def _without_modules(self) -> Iterator[list[tuple[ParallelModule, torch.optim.Optimizer | None]]]:
        """Inside, Accelerate has no models and optimizers to save; yields them in pairs."""
        optimizers = [each.optimizer for each in self._optimizers]
        pairs = [(module, trainer_of(module, optimizers)) for module in self._compiled_models()]
        models, wrapped = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield pairs
        finally:
            self._models, self._optimizers = models, wrapped

"""Lightning: a strategy of its Trainer under which the model inside a LightningModule is compiled.

    Trainer(strategy=AutoparStrategy(), devices=2).fit(LitModel(), loader)          # the changed line

Compiled is the one submodule that has all parameters (`self.model`; `module=` names another), where `training_step`
calls it; what `training_step` does around it, losses and `self.log` among it, runs as it stands. Every rank has the
whole batch. A checkpoint file has the whole weights, and beside it lies `NAME.autopar/`, from which a run goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autopar.errors import ConfigurationError
from autopar.integrations.absent_package import absent
from autopar.integrations.fabric import compiled_precision
from autopar.integrations.prepared_module import is_planned, prepared, when_planned
from autopar.integrations.states import folder_beside, remove_beside, whole_state
from autopar.integrations.whole_batches import example_of, whole_loader
from autopar.runtime.checkpoints.checkpoint import load, save
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.weights.clip_grad import clip_grad_norm_

try:
    from lightning.pytorch.plugins import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise absent("lightning", "lightning") from error

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class AutoparStrategy(DDPStrategy):
    """See the module docstring. module: the submodule to compile; autopar: arguments of `autopar.compile` by name; the
    rest is of Lightning's DDPStrategy."""

    def __init__(
        self, *args: Any, module: str | None = None, autopar: Mapping[str, Any] = _NOTHING, **kwargs: Any
    ) -> None:
        self._autopar, self._module_name, self._resumed = dict(autopar), module, Path()
        self._module: ParallelModule
        super().__init__(*args, **kwargs)

    @property
    def precision_plugin(self) -> Any:
        """That of the Trainer, without autocast: the casts of mixed precision are part of the compiled graph."""
        return self._whole_precision

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        self._precision_plugin = precision_plugin
        self._whole_precision = _WholePrecision(precision_plugin or Precision())

    def process_dataloader(self, dataloader: object) -> object:
        """A loader whose batches are those of all processes together."""
        return whole_loader(dataloader, self.world_size) if isinstance(dataloader, DataLoader) else dataloader

    def setup(self, trainer: Any) -> None:
        """Optimizers are made from the plain model, then it is compiled with them."""
        trainer._accelerator_connector.use_distributed_sampler = False  # every rank reads the whole batch
        self.accelerator.setup(trainer)
        self.model: Any = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            trainer.fit_loop.setup_data()
            self._compile(self._only_optimizer(), example_of(trainer.train_dataloader))
        else:
            self._compile(None, None)
        self.setup_precision_plugin()

    def _compile(self, optimizer: torch.optim.Optimizer | None, example: Any) -> None:
        given = compiled_precision(self.precision_plugin.precision)
        options = {**({"precision": given} if given else {}), **self._autopar}
        self._name = name = self._module_name or self._only_module()
        self._module = prepared(self.lightning_module.get_submodule(name), optimizer, options, example)
        if is_planned(self._module):
            self._put_in()

    def _put_in(self) -> None:
        """The compiled module, where the LightningModule calls it: once it has parameters to count, or is called."""
        parent, _, child = self._name.rpartition(".")
        setattr(self.lightning_module.get_submodule(parent), child, self._module)

    def on_train_start(self) -> None:
        """Before the first training step."""
        self._put_in()

    def on_validation_start(self) -> None:
        """Before the first validation step, which may come before training."""
        self._put_in()

    def on_test_start(self) -> None:
        """Before the first test step."""
        self._put_in()

    def on_predict_start(self) -> None:
        """Before the first prediction."""
        self._put_in()

    def _only_optimizer(self) -> torch.optim.Optimizer:
        if len(self.optimizers) != 1:
            raise ConfigurationError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, a compiled module has one: give one "
                "optimizer groups of parameters"
            )
        found: torch.optim.Optimizer = self.optimizers[0]
        return found

    def _only_module(self) -> str:
        module = self.lightning_module
        own = [name for name, _ in nn.Module.named_parameters(module, recurse=False)]
        children = [name for name, child in module.named_children() if any(True for _ in nn.Module.parameters(child))]
        if own or len(children) != 1:
            raise ConfigurationError(
                f"{type(module).__name__} has its parameters in {', '.join(own + children) or 'nothing'}, and one "
                "submodule is compiled: put them into one module (self.model), or name one: "
                f'AutoparStrategy(module="{(children or ["model"])[0]}") leaves the others out of the plan'
            )
        return str(children[0])

    def teardown(self) -> None:
        """As of Lightning, but that the module stays on its device: its parameters lie across processes."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a compiled module loads."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole plain tensors, under the names of the LightningModule."""
        name = self._name
        kept = self.lightning_module.state_dict() if is_planned(self._module) else {}
        whole = whole_state(self._module) if kept else self._module.original.state_dict()
        inner = {f"{name}.{key}": value for key, value in whole.items()}
        return {**{key: value for key, value in kept.items() if not key.startswith(f"{name}.")}, **inner}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: it lies beside the file, in blocks."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The file as of Lightning, with whole weights; beside it weights and optimizer by `autopar.save`."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint and is_planned(self._module):
            save(folder_beside(filepath), self._module, self._only_optimizer())

    def remove_checkpoint(self, filepath: Any) -> None:
        """The file and what lies beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove_beside(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """The file; `load_model_state_dict` takes what lies beside it."""
        self._resumed = Path(checkpoint_path)
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Weights and, in a fit, optimizer, from beside the file; from the file where nothing lies there."""
        module, optimizer = self._module, self.optimizers[0] if self.optimizers else None
        if folder_beside(self._resumed).is_dir():
            when_planned(module, partial(load, folder_beside(self._resumed), module, optimizer))
            return
        name = f"{self._name}."
        state = checkpoint["state_dict"].items()
        inner = {key.removeprefix(name): value for key, value in state if key.startswith(name)}
        (module if is_planned(module) else module.original).load_state_dict(inner, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done by `load_model_state_dict`. Raises ConfigurationError for the optimizer of another strategy."""
        if any(checkpoint.get("optimizer_states", ())):
            raise ConfigurationError(
                f"{self._resumed} has the optimizer's state of another strategy: resume it under that one, or take its "
                "weights alone (LitModel.load_from_checkpoint) and begin with a new optimizer"
            )


class _WholePrecision(Precision):
    """A precision of Lightning whose clipping is autopar's, and whose autocast is left to the graph."""

    def __init__(self, given: Any) -> None:
        self.given, self.precision = given, given.precision

    def convert_module(self, module: nn.Module) -> Any:
        return self.given.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        return self.given.convert_input(data)

    def tensor_init_context(self) -> Any:
        return self.given.tensor_init_context()

    def module_init_context(self) -> Any:
        return self.given.module_init_context()

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        with contextlib.nullcontext() if isinstance(self.given, MixedPrecision) else self.given.forward_context():
            yield

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_grad_norm_(self.main_params(optimizer), clip_val)

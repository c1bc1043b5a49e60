"""Transformers: its `Trainer`, on a model that autopar compiles.

    from autopar.integrations.transformers import Trainer          # the changed line
    Trainer(model=model, args=TrainingArguments(...), train_dataset=data).train(resume_from_checkpoint=True)

The batch of a step is that of the Trainer: per_device_train_batch_size times the number of processes, times the steps
of accumulation. Every rank has all of it, so tokens are counted once: `average_tokens_across_devices` is turned off.
A checkpoint has the whole weights, which `from_pretrained` reads, and beside them `autopar/`, from which a run goes
on, also under another plan and number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar._compat import tree_map_only
from autopar.errors import ConfigurationError
from autopar.integrations.absent_package import absent
from autopar.integrations.accelerate import Accelerator
from autopar.integrations.prepared_module import compiled_in, plain
from autopar.integrations.states import folder_in, whole_state
from autopar.runtime.checkpoints.checkpoint import load, save
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.weights.whole_weights import without_weights

try:
    import transformers
except ModuleNotFoundError as error:
    raise absent("transformers", "hf") from error

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Trainer(transformers.Trainer):
    """See the module docstring. autopar: arguments of `autopar.compile` by name, such as {"dims": {"tp": 2}}."""

    def __init__(self, *args: Any, autopar: Mapping[str, Any] = _NOTHING, **kwargs: Any) -> None:
        self._autopar = autopar
        self._accelerator_arguments: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_arguments = super()._build_accelerator_args(**kwargs)
        return self._accelerator_arguments

    def create_accelerator_and_postprocess(self) -> None:
        """With autopar's Accelerator of the same settings."""
        super().create_accelerator_and_postprocess()
        self.args.average_tokens_across_devices = False  # every rank counts the tokens of all
        self.accelerator: Any = _TrainerAccelerator(**self._accelerator_arguments, autopar=self._autopar)
        self.gather_function = self.accelerator.gather_for_metrics

    def get_train_dataloader(self) -> Any:
        """That of the Trainer; the model is planned for what `compute_loss` passes of its first batch."""
        self.accelerator.example = None
        loader = super().get_train_dataloader()
        if self.accelerator.example is not None:
            self.accelerator.example = self._keywords_of(self.accelerator.example)
        return loader

    def _keywords_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        items = self._get_num_items_in_batch([batch], self.args.device)
        outside = self.label_smoother is not None or self.compute_loss_func is not None
        keywords = {name: value for name, value in batch.items() if not (outside and name == "labels")}
        return {**keywords, **self._counted(items)}

    def _counted(self, items: Any) -> dict[str, Any]:
        return {"num_items_in_batch": items} if self.model_accepts_loss_kwargs and items is not None else {}

    @property
    def _module(self) -> ParallelModule | None:
        return compiled_in(self.model_wrapped)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return self._module or super()._wrap_model(model, training, dataloader)

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """That of the Trainer. The loss stands once for each process, whose samples it is the mean of: the Trainer
        repeats it by the samples of one."""
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        count = 1 if self.accelerator.split_batches else self.args.world_size
        return (None if loss is None else loss.expand(count)), logits, labels

    # checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        module = self._module
        if module is None:
            super()._save(output_dir, state_dict=state_dict)
            return
        state = state_dict or whole_state(module)
        kept: Any = self.model
        self.model: Any = without_weights(module.original, module.training, module.absent)
        try:  # only rank 0 writes, and writing changes the configuration, which forward may read
            super()._save(output_dir, state_dict=state)
        finally:
            self.model = kept

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._module is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            save(folder_in(output_dir), self._module, self._plain_optimizer(), extra={"scheduler": self.lr_scheduler})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._module is None and not folder_in(resume_from_checkpoint).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # whole weights, into the plain model

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        module, folder = self._module, folder_in(checkpoint)
        if module is None or not folder.is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            load(folder, module, self._plain_optimizer(), extra={"scheduler": self.lr_scheduler})

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        if self._module is None:
            super()._load_best_model()
        elif not folder_in(best).is_dir():
            raise ConfigurationError(
                f"the best checkpoint {best} has no folder {folder_in(best).name}, from which a compiled module loads: "
                "leave out save_only_model=True, or read the checkpoint with from_pretrained"
            )
        else:
            load(folder_in(best), self._module, extra={"scheduler": self.lr_scheduler})

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """Without Accelerate's wrapper."""
        wrapped: Any = self.optimizer
        found: torch.optim.Optimizer = getattr(wrapped, "optimizer", wrapped)
        return found


class _TrainerAccelerator(Accelerator):
    """The Trainer gathers what it counts in its batches, of which every rank has the whole, and what it repeats for
    each of their samples, which may be too many for a short last one."""

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Whole plain tensors, of as many rows as the batch has."""
        rest = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        whole = plain(input_data)
        if rest <= 0:
            return whole
        return tree_map_only(torch.Tensor, lambda each: each[:rest] if each.ndim else each, whole)

    def gather(self, tensor: Any) -> Any:
        """Whole plain tensors, once."""
        return plain(tensor)

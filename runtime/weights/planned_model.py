"""Planned model: what a compiled module answers once its plan is there, and what it answers as the plain model does.

    module.full(out.logits), module.full(weight.grad)     the value that one device has, on every rank
    module.full_state_dict()                              as of the plain model
    module.plain_model()                                  the original with whole weights, a copy on every rank
    module.generate(tokens)                               by such a copy
    module.save_weights("folder")                         safetensors files, one tensor gathered at a time
    module.load_weights("folder")                         every rank reads its blocks of such files
    module.save_pretrained("folder")                      of a model of transformers: as save_weights, and its
                                                          configuration; of others by such a copy on rank 0

All ranks call each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import tree_map_only
from autopar.errors import ConfigurationError
from autopar.plans.parallel_plan import Plan
from autopar.renamed import renamed
from autopar.request.memory_limit import number_of_bytes
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.consensus import from_first_rank
from autopar.runtime.guards.held_model import HeldModel
from autopar.runtime.parameters import whole_tensor
from autopar.runtime.process_groups import rank
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.handed_outputs import is_handed, whole_output
from autopar.runtime.weights.found_weights import find_weights
from autopar.runtime.weights.pretrained_folders import is_saved_as_it_is, save_all_but_weights
from autopar.runtime.weights.shard_model import load_into
from autopar.runtime.weights.whole_weights import plain_copy, whole_state
from autopar.runtime.weights.written_weights import MAX_SHARD_SIZE, save_weights


class PlannedModel(HeldModel):
    """See the module docstring. A subclass makes its attributes before `_hold`."""

    _first: Step | None
    """Of the first inputs; None until they come."""
    _absent: dict[str, nn.Parameter]
    _is_local = False
    """Whether outputs are this rank's rows."""

    def _planned(self) -> Step:
        if self._first is None:
            raise ConfigurationError(
                "this module is planned at its first call, so its parameters, plan and mesh do not exist yet: "
                "call it once, or pass example_inputs to autopar.compile"
            )
        return self._first

    @property
    def plan(self) -> Plan:
        """The plan of the first graph."""
        return self._planned().plan

    @property
    def device(self) -> torch.device:
        """Of this rank's tensors."""
        return self._planned().groups.device

    @property
    def absent(self) -> Mapping[str, nn.Parameter]:
        """Every name of the parameters that only ranks of other stages hold, with an empty tensor of their shape."""
        return self._absent

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of every parameter."""
        return self._planned().groups.device_mesh

    # as the plain model

    def full(self, values: Any) -> Any:
        """The whole value of what the module hands out: an output, a gradient, a parameter, or lists and dicts of them.

        Plain tensors on every rank, differentiable; all ranks call it. Other values come back as they are. Raises
        ConfigurationError for a tensor that was made of a part of an output, which nobody can tell the whole of.
        """
        held = list(values) if isinstance(values, Iterator) else values
        with HERE.inside("full"):
            self._meet_before("module.full(...)")
            return tree_map_only(torch.Tensor, self._whole, held)

    def gather(self, output: Any) -> Any:
        """The old name of `full`."""
        renamed("module.gather", stacklevel=2)
        return self.full(output)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return whole_tensor(tensor)
        if self._is_local and tensor.dim() and not is_handed(tensor):
            raise ConfigurationError(
                f"module.full takes what the module hands out; a tensor of shape {tuple(tensor.shape)} is none of its "
                'outputs, gradients and parameters, and with batch="local" it may be made of rows of this rank: take '
                "module.full(...) of the output, and compute with that"
            )
        return whole_output(tensor)

    def full_state_dict(self, *, only_on_rank_0: bool = False) -> dict[str, Any]:
        """Names, shapes and values of the plain model's `state_dict()`; tied weights are one tensor. All ranks call it.

        only_on_rank_0: there, on the CPU, and empty dicts on the others.
        """
        return self._whole_state(only_on_rank_0, tensors=False)

    def plain_model(self, *, only_on_rank_0: bool = False) -> nn.Module | None:
        """A copy of the original on one device with the weights of now, whole; all ranks call it.

        What is done with it (methods of the model, other loops) leaves this module as it is. only_on_rank_0: there, on
        the CPU, and None on the others.
        """
        tensors = self._whole_state(only_on_rank_0, tensors=True)
        return None if only_on_rank_0 and rank() > 0 else plain_copy(self.original, self._absent, tensors)

    def _whole_state(self, only_on_rank_0: bool, *, tensors: bool) -> dict[str, Any]:
        step = self._planned()
        with HERE.inside("full_state_dict"):
            self._meet_before("gathering all weights")
            return whole_state(
                self.original,
                self._absent,
                self.device,
                in_stages=step.plan.in_stages,
                only_on_rank_0=only_on_rank_0,
                tensors=tensors,
            )

    def save_weights(self, path: str | Path, *, max_shard_size: float | str = MAX_SHARD_SIZE) -> None:
        """Write parameters and persistent buffers into a folder, as safetensors under the plain model's names, with an
        index where they take several files. All ranks call it; rank 0 writes, and no rank holds more than one tensor.

        max_shard_size: bytes of a file, or "5GB". Raises ConfigurationError on every rank.
        """
        self._save_weights(path, max_shard_size)

    def _save_weights(
        self, path: str | Path, max_shard_size: float | str, others: Callable[[Path], object] = lambda _: None
    ) -> None:
        step = self._planned()
        most_bytes = number_of_bytes(max_shard_size, "max_shard_size")
        with HERE.inside("save_weights"):
            self._meet_before("writing weights")
            save_weights(
                self.original,
                self._absent,
                path,
                self.device,
                most_bytes=most_bytes,
                in_stages=step.plan.in_stages,
                others=others,
            )

    def load_weights(self, path: str | Path) -> None:
        """Take parameters and persistent buffers from a folder of safetensors files, as `autopar.compile(weights=)`;
        every rank reads the bytes of its blocks. All ranks call it; where it fails, nothing was changed.

        Raises ConfigurationError, naming file, tensor and numbers.
        """
        step = self._planned()
        with HERE.inside("load_weights"):
            self._meet_before("loading weights")
            found = find_weights(self.original, path, self._absent)
            assert found is not None
            load_into(self.original, step, found)

    def _method(self, name: str) -> Any:
        if name == "generate":
            return self._generate
        if name == "save_pretrained":
            return self._save_pretrained
        return super()._method(name)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """As of the original, with whole weights; all ranks call it, each for inputs of its own."""
        return cast(Any, self.plain_model()).generate(*args, **kwargs)

    def _save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As of the original; all ranks call it. What only a copy with whole weights can do, rank 0 does with one."""
        if len(args) == 1 and kwargs.keys() <= {"max_shard_size"} and is_saved_as_it_is(self.original):
            size = kwargs.get("max_shard_size", MAX_SHARD_SIZE)
            self._save_weights(args[0], size, partial(save_all_but_weights, self.original))
            return
        plain: Any = self.plain_model(only_on_rank_0=True)
        from_first_rank(lambda: (plain.save_pretrained(*args, **kwargs), True)[1], "save_pretrained")

    def _meet_before(self, act: str) -> None:
        """Ranks compare what they are about to do; in a pipeline they hold different tensors and may not."""

    # what is defined only once planned

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of nn.Module. Raises ConfigurationError before the module is planned."""
        self._planned()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of nn.Module, parameters as DTensors. Raises ConfigurationError before the module is planned."""
        self._planned()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of nn.Module; full plain tensors are accepted too. Raises ConfigurationError before it is planned."""
        self._planned()
        return super().load_state_dict(*args, **kwargs)

"""Jobs of one worker share what was captured of a model: tracing takes nine tenths of a job's time.

    compile_once("gpt2", model, batch, plan=a)      traces
    compile_once("gpt2", model, batch, plan=b)      the same programs, lowered as the other plan says
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import api
from autopar.capture.captures import Captures, autocast_state
from autopar.program import Program
from autopar.runtime.parallel_module import ParallelModule


class CapturedOnce(Captures):
    """Captures that give a program again where the sizes of the inputs, and the mode, are those of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: dict[Any, Program] = {}

    def capture(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], **options: Any) -> Program:
        assert not args
        sizes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in kwargs.items())
        key = (sizes, model.training, autocast_state(), tuple(sorted((n, repr(o)) for n, o in options.items())))
        if key not in self._programs:
            self._programs[key] = super().capture(model, args, kwargs, **options)
        return self._programs[key]


_OF_MODEL: dict[str, CapturedOnce] = {}


def compile_once(name: str, model: nn.Module, inputs: Mapping[str, torch.Tensor], **options: Any) -> ParallelModule:
    """`autopar.compile` of a model that is always the same under this name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "Captures", lambda: _OF_MODEL.setdefault(name, CapturedOnce()))
        return autopar.compile(model, inputs, **options)

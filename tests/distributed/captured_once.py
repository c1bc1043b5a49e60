"""Jobs of one worker share what was captured of a model: tracing takes nine tenths of a job's time.

compile_once("gpt2", model, batch, plan=a)      traces
compile_once("gpt2", model, batch, plan=b)      the same programs, lowered as the other plan says
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import nn
from torch.utils._pytree import tree_leaves

import autopar
from autopar import api
from autopar.capture.captures import Captures, autocast_state
from autopar.planner.micro_batches import Recapture, planned_parts
from autopar.program import MicroProgram, Program
from autopar.runtime.parallel_module import ParallelModule


class CapturedOnce(Captures):
    """Captures that give a program again where the sizes of the inputs, and the mode, are those of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: dict[Any, Program] = {}
        self._in_parts: dict[tuple[int, int], MicroProgram] = {}

    def capture(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Program:
        assert options["loss_fn"] is None, "functions are told apart by their text only"
        names = (len(args), *kwargs)
        sizes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tree_leaves((args, dict(kwargs))))
        key = (names, sizes, model.training, autocast_state(), tuple(sorted((n, repr(o)) for n, o in options.items())))
        if key not in self._programs:
            self._programs[key] = super().capture(model, args, kwargs, **options)
        return self._programs[key]

    def in_parts(self, whole: Program, count: int, recapture: Recapture) -> MicroProgram:
        """As `planned_parts`, once per program and number of parts."""
        assert any(whole is program for program in self._programs.values()), "else its id may come again"
        key = (id(whole), count)
        if key not in self._in_parts:
            self._in_parts[key] = planned_parts(whole, count, recapture)
        return self._in_parts[key]


_OF_MODEL: dict[tuple[str, str], CapturedOnce] = {}


def compile_once(name: str, model: nn.Module, inputs: Any, **options: Any) -> ParallelModule:
    """`autopar.compile` of a model that computes the same, in one precision, wherever this name and its text agree."""
    captures = _OF_MODEL.setdefault((name, str(model)), CapturedOnce())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "Captures", lambda: captures)
        patch.setattr(api, "planned_parts", captures.in_parts)
        return autopar.compile(model, inputs, **options)

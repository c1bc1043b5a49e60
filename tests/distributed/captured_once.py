"""Jobs share what was captured of a model: tracing takes nine tenths of a job's time.

    compile_once("gpt2", model, batch, plan=a)      traces
    compile_once("gpt2", model, batch, plan=b)      the same programs, lowered as the other plan says
    capture_once("gpt2", model, batch)              in the `prepare` of a job: all its ranks have these programs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import autopar
from autopar import api
from autopar.capture import normalize_example_inputs
from autopar.capture.captures import Captures, autocast_state
from autopar.hardware.cluster import Cluster
from autopar.planner.batch.micro_batch_program import Recapture, planned_parts
from autopar.program import MicroProgram, Program
from autopar.questions import capture_model
from autopar.request import Request
from autopar.runtime.parallel_module import ParallelModule

Job = TypeVar("Job", bound=Callable[..., Any])


_TOLD = ("batch_dims", "training", "precision", "differentiable", "notes")


class CapturedOnce(Captures):
    """Captures that give a program again where the sizes of the inputs, and the mode, are those of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: dict[Any, Program] = {}
        self._in_parts: dict[tuple[int, int, tuple[str, ...]], MicroProgram] = {}

    def capture(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Program:
        leaves, structure = tree_flatten((args, dict(kwargs), options["batch"]))
        forms = tuple(_form(leaf) for leaf in leaves)
        modes = tuple(module.training for module in model.modules())
        loss_fn = options["loss_fn"]  # itself in the key: the same function, which stays alive with it
        told = tuple(str(options.get(name)) for name in _TOLD)
        key = (str(structure), forms, modes, autocast_state(), loss_fn, told)
        if key not in self._programs:
            self._programs[key] = super().capture(model, args, kwargs, **options)
        return self._programs[key]

    def in_parts(
        self, whole: Program, count: int, recapture: Recapture, *, kernels: tuple[str, ...] = ()
    ) -> MicroProgram:
        """As `planned_parts`, once per program, number of parts and kernels."""
        assert any(whole is program for program in self._programs.values()), "else its id may come again"
        key = (id(whole), count, kernels)
        if key not in self._in_parts:
            self._in_parts[key] = planned_parts(whole, count, recapture, kernels=kernels)
        return self._in_parts[key]

    @property
    def made(self) -> int:
        """How many programs were made."""
        return len(self._programs) + len(self._in_parts)


def _form(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


_OF_MODEL: dict[Any, CapturedOnce] = {}


def captures_of(name: str, model: nn.Module) -> CapturedOnce:
    """What this process has of a model."""
    return _OF_MODEL.setdefault((name, *_described(model)), CapturedOnce())


def _described(model: nn.Module) -> tuple[Any, ...]:
    """What decides over its graph, as far as modules hold it: numbers and words, configurations, forms of tensors."""
    plain = bool | int | float | str | type(None)
    held = tuple(
        (name, key, repr(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, plain) and key != "training"
    )
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    forms = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    types = tuple(type(module) for module in model.modules())
    return str(model), types, held, forms, repr(getattr(model, "config", None))


class SharedCaptures(Captures):
    """In place of `Captures`: the captures of equal models are shared, whichever test asks."""

    def capture(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Program:
        return captures_of("shared", model).capture(model, args, kwargs, **options)


def compile_once(name: str, model: nn.Module, inputs: Any, **options: Any) -> ParallelModule:
    """`autopar.compile` of a model that computes the same, in one precision, wherever this name and its text agree."""
    captures = captures_of(name, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "Captures", lambda: captures)
        patch.setattr(api, "planned_parts", captures.in_parts)
        return autopar.compile(model, inputs, **options)


def capture_once(
    name: str, model: nn.Module, inputs: Any, *, parts: int = 1, evaluates: bool = False, **options: Any
) -> bool:
    """Capture what `compile_once` will ask for, with its step in micro-batches; whether there was anything to do.

    evaluates: in eval mode too."""
    captures = captures_of(name, model)
    before = captures.made
    args, kwargs = normalize_example_inputs(inputs)
    given = Request(cluster=Cluster.parse("1 cpu"), **options)
    for training in (True, False) if evaluates else (True,):
        model.train(training)
        captured = capture_model(model, args, kwargs, given, captures)
        if parts > 1:
            captures.in_parts(captured.program, parts, captured)
    return captures.made > before


def prepared_by(prepare: Callable[..., bool]) -> Callable[[Job], Job]:
    """Mark a job: a template calls `prepare` with its arguments before workers are forked for it."""

    def marked(job: Job) -> Job:
        job.prepare = prepare  # type: ignore[attr-defined]
        return job

    return marked

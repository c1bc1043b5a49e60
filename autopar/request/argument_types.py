"""Argument types: what each argument of `compile` and `plan` may be, as data, and the one place that compares.

    check_arguments(dims=[4])      # ConfigurationError: dims=[4]: write axis -> size, such as {"tp": 4}

What a value of the right type means (a mesh that has other devices than the cluster) is checked where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from autopar.errors import ConfigurationError
from autopar.plans.parallel_plan import Plan

Branch: TypeAlias = Literal["example"]
"""Which branches a capture takes where values decide."""


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """holds: whether a value may be passed; write: what to write, for messages; optional: whether None may be, too."""

    holds: Callable[[Any], bool]
    write: str
    optional: bool = True


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_a(value: Any, kind: str) -> bool:
    """Whether a value is of a class of torch, or of one below it, named in full: nothing of torch is loaded for it."""
    return any(f"{each.__module__}.{each.__qualname__}" == kind for each in type(value).__mro__)


def _is_plan(value: Any) -> bool:
    return isinstance(value, Plan | str | Path)


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


ARGUMENT_TYPES: Mapping[str, ArgumentType] = MappingProxyType(
    {
        "loss_fn": ArgumentType(callable, "a function of (output, batch) that returns a 0-dim loss"),
        "optimizer": ArgumentType(
            lambda value: callable(value) or isinstance(value, str) or _is_a(value, "torch.optim.optimizer.Optimizer"),
            "an optimizer, its class, its name or a function of the parameters, such as torch.optim.AdamW",
        ),
        "mesh": ArgumentType(
            lambda value: _is_list(value) and all(map(_is_whole, value)), "the sizes of the mesh, such as (2, 4)"
        ),
        "dims": ArgumentType(_has_names, 'axis -> size, such as {"tp": 4, "dp_shard": -1}'),
        "plan": ArgumentType(_is_plan, "a Plan or the path of its file"),
        "batch": ArgumentType(
            lambda value: value in ("global", "local"),
            '"global" (every rank passes all of it) or "local" (its part)',
            optional=False,
        ),
        "batch_dims": ArgumentType(
            lambda value: _has_names(value) and all(dim is None or _is_whole(dim) for dim in value.values()),
            'input -> dim of its samples or None, such as {"mask": None, "tokens": 1}',
        ),
        "differentiable": ArgumentType(
            lambda value: _is_list(value) and all(isinstance(name, str) for name in value),
            'names of outputs, such as ["logits"]',
            optional=False,
        ),
        "strict": ArgumentType(lambda value: isinstance(value, bool), "True or False", optional=False),
        "discover": ArgumentType(lambda value: isinstance(value, bool), "True or False", optional=False),
        "branches": ArgumentType(
            lambda value: value in get_args(Branch),
            '"example" (the branches that the example inputs take, checked in every call), or leave it out',
        ),
        "deterministic": ArgumentType(
            lambda value: isinstance(value, int),
            "True (equal bits for equal plans) or a number of logical shards, such as 8 (on 1, 2, 4 and 8 processes)",
            optional=False,
        ),
        "verify": ArgumentType(lambda value: isinstance(value, bool), "True or False", optional=False),
        "cuda_graphs": ArgumentType(lambda value: isinstance(value, bool), "True or False", optional=False),
        "cache_dir": ArgumentType(lambda value: isinstance(value, str | Path), "the path of a folder"),
        "micro_batches": ArgumentType(_is_whole, "a whole number of parts of the batch"),
        "kernels": ArgumentType(
            lambda value: _is_list(value) and all(isinstance(kind, str) for kind in value),
            'kinds of kernels, such as ["rms_norm", "cross_entropy"]',
        ),
        "schedule": ArgumentType(lambda value: isinstance(value, str), 'a family of schedules, such as "1f1b"'),
        "warm_start": ArgumentType(_is_plan, "a Plan or the path of its file"),
        "scaler": ArgumentType(
            lambda value: _is_a(value, "torch.amp.grad_scaler.GradScaler"), "a torch.amp.GradScaler"
        ),
        "sync": ArgumentType(
            lambda value: value in ("broadcast", "check"),
            '"broadcast" (weights of rank 0) or "check" (compare only)',
            optional=False,
        ),
        "outputs": ArgumentType(
            lambda value: value in ("lazy", "gather"),
            '"lazy" (gathered when they are first read) or "gather" (in every call)',
            optional=False,
        ),
        "weights": ArgumentType(
            lambda value: isinstance(value, str | Path), "the path of a folder with safetensors files, or of one file"
        ),
        "check_calls": ArgumentType(
            lambda value: _is_whole(value) and value >= 0,
            "at every how many calls values of inputs are compared; 0: at none",
            optional=False,
        ),
    }
)
"""Of the arguments that no other module reads and checks."""


def check_arguments(**arguments: Any) -> None:
    """Raises ConfigurationError for a value that its argument cannot be."""
    for name, value in arguments.items():
        asked = ARGUMENT_TYPES[name]
        if (value is None and asked.optional) or asked.holds(value):
            continue
        text = repr(value)
        raise ConfigurationError(f"{name}={text if len(text) <= 80 else f'{text[:77]}...'}: write {asked.write}")

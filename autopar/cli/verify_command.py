"""`autopar verify`: compile a model with `verify=True` on local processes, as torchrun would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import click
import torch
from torch import nn

from autopar.api import compile as compile_model
from autopar.capture.models import load_model
from autopar.cli.model_options import model_options
from autopar.cli.options import OneOf, planning_arguments
from autopar.cli.output import as_json_option, print_document, print_question
from autopar.plans.parallel_plan import Plan
from autopar.request.precision_name import PRECISION_NAMES
from autopar.runtime.local_processes import Report, run_processes

Inputs: TypeAlias = dict[str, Any] | tuple[Any, ...]


@click.command()
@model_options
@click.option(
    "--precision",
    type=OneOf(PRECISION_NAMES),
    default="fp32",
    show_default=True,
    help="bf16: fp32 parameters, bf16 products.",
)
@click.option("--processes", type=click.IntRange(min=1), default=4, show_default=True, help="Local gloo processes.")
@click.option(
    "--plan", "plan_path", type=click.Path(dir_okay=False, path_type=Path), help="A plan file; default: make one."
)
@as_json_option
def verify(model: str, processes: int, plan_path: Path | None, as_json: bool, **options: Any) -> None:
    """Compile MODEL on local processes and compare loss and gradients with the plain model.

    Example: autopar verify hf:config.json --processes 2 --batch 8 --seq 32
    """
    print_question({"model": model, "processes": processes, **options})
    verify_model(model, processes, None if plan_path is None else Plan.load(plan_path), options)
    if as_json:
        print_document({"model": model, "processes": processes, "verified": True})
    else:
        click.echo(f"{model}: {processes} processes compute the loss and the gradients of one")


def verify_model(model: str, processes: int, plan: Plan | None, options: Mapping[str, Any]) -> None:
    """Raises VerificationError where `processes` local processes do not compute what the plain model computes."""
    run_processes(_verify, processes, model, None if plan is None else plan.to_json(), dict(options))


def _verify(report: Report, model: str, plan: bytes | None, options: dict[str, Any]) -> None:
    values = options["branches"] is not None
    module, inputs = load_model(model, options["batch"], options["seq"], values=values)
    if not values:
        module, inputs = materialised(module, inputs)
    compiled = compile_model(
        module,
        inputs,
        plan=None if plan is None else Plan.from_json(plan),
        **planning_arguments(options),
        precision=None if plan is not None else options["precision"],
        verify=True,
    )
    compiled(*inputs) if isinstance(inputs, tuple) else compiled(**inputs)


def materialised(module: nn.Module, example: Inputs) -> tuple[nn.Module, Inputs]:
    """The model with random weights and the example with random values, the same in every process."""
    torch.manual_seed(0)
    module = module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            nn.init.normal_(tensor, std=0.05)
            if tensor.ndim < 2:
                tensor.detach().abs_()
        else:
            tensor.zero_()
    limit = token_limit(module)
    if isinstance(example, tuple):
        return module, tuple(_random_like(value, limit) for value in example)
    return module, {name: _random_like(value, limit) for name, value in example.items()}


def token_limit(module: nn.Module) -> int:
    """Integers below this are valid tokens and labels: the vocabulary of a Hugging Face model, else 2."""
    embeddings = getattr(module, "get_input_embeddings", None)
    found = embeddings() if callable(embeddings) else None
    return found.num_embeddings if isinstance(found, nn.Embedding) else 2


def _random_like(value: Any, limit: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, dtype=value.dtype)
    return torch.randint(0, limit, value.shape).to(value.dtype)

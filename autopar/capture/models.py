"""Models by name, built on the meta device: `pkg.module:factory` or `hf:CONFIG.json`.

    load_model("train:make_model", batch=32, seq=1024, dtype=torch.bfloat16)
    load_model("hf:llama-3-8b.json", batch=16, seq=8192, dtype=torch.bfloat16)

A factory returns a model, or (model, example inputs); it is code, which runs. A Hugging Face configuration is data
(`model_configurations.py`). No weight is allocated and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture.inputs import normalize_example_inputs
from autopar.capture.model_configurations import build_configured
from autopar.errors import ConfigurationError
from autopar.request.model_name import HUGGINGFACE, is_configuration


def load_model(
    spec: str, batch: int, seq: int, dtype: torch.dtype = torch.float32, *, values: bool = False
) -> tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]:
    """(model on meta in `dtype`, example inputs): keyword arguments as a dict or positional ones as a tuple.

    batch and seq shape the example inputs of Hugging Face models; a factory gets those of the keywords `batch`,
    `seq` and `dtype` that it accepts. values: weights and inputs as the factory makes them, not on meta, the same in
    every process. Raises ConfigurationError naming what cannot be found or built.
    """
    if is_configuration(spec):
        if values:
            raise ConfigurationError(
                f'{spec}: a configuration has no values, and branches="example" takes the branches that real weights '
                "and inputs take: write a factory (package.module:factory) that returns the model with its weights, "
                "and example inputs"
            )
        return build_configured(Path(spec.removeprefix(HUGGINGFACE)), batch, seq, dtype)
    return _call_factory(spec, {"batch": batch, "seq": seq, "dtype": dtype}, values)


def _call_factory(
    spec: str, options: dict[str, Any], values: bool
) -> tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]:
    factory = _find_factory(spec)
    try:
        signature = inspect.signature(factory)
        arguments = {name: value for name, value in options.items() if name in signature.parameters}
        signature.bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{spec} cannot be called with {', '.join(options)} alone ({error}): write a factory that returns a "
            "torch.nn.Module, or (model, example inputs)"
        ) from error
    if values:
        torch.manual_seed(0)
    with contextlib.nullcontext() if values else torch.device("meta"):
        made = factory(**arguments)
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{spec} returned {type(model).__name__}; return a torch.nn.Module")
    model = (model if values else model.to(device="meta")).to(options["dtype"])
    if inputs is None:
        return model, {}
    args, kwargs = normalize_example_inputs(inputs)
    return model, kwargs or args


def _find_factory(spec: str) -> Any:
    module_name, _, function = spec.partition(":")
    if not module_name or not function:
        raise ConfigurationError(f"{spec!r} is no model: write package.module:factory or hf:CONFIG.json")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{spec!r}: no module named {error.name!r} (searched {Path.cwd()} too)") from None
    factory = getattr(module, function, None)
    if not callable(factory):
        raise ConfigurationError(f"{spec!r}: {module_name} has no function {function!r}")
    return factory

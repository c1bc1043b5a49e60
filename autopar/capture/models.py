"""Models by name, built on the meta device: `pkg.module:factory` or `hf:CONFIG.json`.

    load_model("train:make_model", batch=32, seq=1024, dtype=torch.bfloat16)
    load_model("hf:llama-3-8b.json", batch=16, seq=8192, dtype=torch.bfloat16)

A factory returns a model, or (model, example inputs). A Hugging Face configuration names its class in
`architectures`; example inputs with labels are derived from it: causal and masked language models, sequence to
sequence, image classification. No weight is allocated and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.inputs import normalize_example_inputs
from autopar.errors import ConfigurationError

HUGGINGFACE = "hf:"


def load_model(
    spec: str, batch: int, seq: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]:
    """(model on meta in `dtype`, example inputs): keyword arguments as a dict or positional ones as a tuple.

    batch and seq shape the example inputs of Hugging Face models; a factory gets those of the keywords `batch`,
    `seq` and `dtype` that it accepts. Raises ConfigurationError naming what cannot be found or built.
    """
    if spec.startswith(HUGGINGFACE):
        return _load_huggingface(Path(spec.removeprefix(HUGGINGFACE)), batch, seq, dtype)
    return _call_factory(spec, {"batch": batch, "seq": seq, "dtype": dtype})


def _call_factory(spec: str, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]:
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
    with torch.device("meta"):
        made = factory(**arguments)
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{spec} returned {type(model).__name__}; return a torch.nn.Module")
    model = model.to(device="meta").to(options["dtype"])
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


def _load_huggingface(path: Path, batch: int, seq: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    config = _read_config(path)
    transformers = _import_transformers()
    architecture = config["architectures"][0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ConfigurationError(f"{path}: transformers {transformers.__version__} has no class {architecture}")
    with torch.device("meta"), _default_dtype(dtype):
        model, configuration = _build(path, model_class, config)
        inputs = _example_inputs(architecture, configuration, batch, seq, dtype)
    return model.train(), inputs


def _build(path: Path, model_class: Any, config: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The model and its configuration; what transformers says of values that cannot be is a ConfigurationError."""
    refused: type[Exception] = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    try:
        configuration = model_class.config_class.from_dict(config)
        model: nn.Module = model_class(configuration)
    except (refused, ValueError, TypeError, KeyError, RuntimeError, ArithmeticError) as error:
        raise ConfigurationError(f"{path}: {model_class.__name__} cannot be built from it: {error}") from error
    return model, configuration


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made in `dtype`; what a model computes in fp32 on purpose (rotary frequencies) stays so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{file} does not exist; give the path of a model's config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is no JSON: {error}") from None
    named = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(named, list) or not named:
        raise ConfigurationError(f'{file} has no list of "architectures"; add for example ["LlamaForCausalLM"]')
    return dict(config)


def _import_transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise ConfigurationError("hf: models need transformers: pip install 'autopar[hf]'") from None


def _example_inputs(architecture: str, config: Any, batch: int, seq: int, dtype: torch.dtype) -> dict[str, Any]:
    if "ForImageClassification" in architecture:
        channels, size = getattr(config, "num_channels", 3), getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        images = torch.empty(batch, channels, height, width, dtype=dtype)
        return {"pixel_values": images, "labels": torch.empty(batch, dtype=torch.long)}
    if any(kind in architecture for kind in ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        return {"input_ids": _tokens(batch, seq), "labels": _tokens(batch, seq)}
    raise ConfigurationError(
        f"no example inputs are known for {architecture}; write a factory that returns (model, example inputs) and "
        "name it package.module:factory"
    )


def _tokens(batch: int, seq: int) -> Tensor:
    return torch.empty(batch, seq, dtype=torch.long)

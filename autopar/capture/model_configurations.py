"""Hugging Face configurations: a model and example inputs from a config.json, which is data and never code.

    build_configured(Path("llama-3-8b.json"), batch=16, seq=8192, dtype=torch.bfloat16)

`architectures` names a class of transformers; nothing else that a file says is imported, downloaded or run: code of its
own (`auto_map`), kernels of a hub and quantized or pretrained parts are refused by their entry. Example inputs with
labels are derived: causal and masked language models, sequence to sequence, image classification.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import ConfigurationError
from autopar.files import decoded_json, file_content

OWN_CODE = "it names code of its own, and a configuration is data: delete the entry, transformers' own class is built"
WHOLE_WEIGHTS = "a plan is for weights that train, as the model makes them: delete the entry"
LOADED = "it loads weights from elsewhere, and nothing is downloaded: delete the entry"
REFUSED: Mapping[str, str] = {
    "auto_map": OWN_CODE,
    "trust_remote_code": OWN_CODE,
    "custom_pipelines": OWN_CODE,
    "quantization_config": WHOLE_WEIGHTS,
    "compression_config": WHOLE_WEIGHTS,
    "use_pretrained_backbone": LOADED,
}
"""Entries at any depth, and why they may not be on."""

IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""Entries that choose kernels, by any of their names -> what is torch's own. Others come from a hub or a library."""

MOST: Mapping[str, int] = {"layer": 10_000, "expert": 100_000, "label": 1_000_000}
"""What a name counts -> how many are built."""


def build_configured(path: Path, batch: int, seq: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """(model on meta in `dtype`, example inputs) of a configuration, or of the folder that holds its config.json.

    Raises ConfigurationError naming the entry that cannot be meant, or that asks for more than data.
    """
    config = _read_config(path)
    architecture = config["architectures"][0]
    model_class = _class_of(path, architecture)
    with torch.device("meta"), _default_dtype(dtype), _offline():
        model, configuration = _build(path, model_class, config)
        inputs = _example_inputs(architecture, configuration, batch, seq, dtype)
    return model.train(), inputs


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ConfigurationError(f"{file} does not exist; give the path of a model's config.json")
    config = decoded_json(file_content(file, str(file)), str(file))
    named = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise ConfigurationError(f'{file} has no list of "architectures"; add for example ["LlamaForCausalLM"]')
    _check_entries(file, config, ())
    return dict(config)


def _check_entries(file: Path, value: Any, above: tuple[str, ...]) -> None:
    """Raises ConfigurationError for an entry at any depth that is more than data, or larger than what is built."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        entry = (*above, str(key))
        if why := _why_refused(str(key), each):
            raise ConfigurationError(f"{file}: {'.'.join(entry)} is {str(each)[:80]!r}; {why}")
        _check_entries(file, each, entry)


def _why_refused(name: str, value: Any) -> str | None:
    """What to do about an entry, None where it may stand."""
    if name in REFUSED:
        return REFUSED[name] if value else None
    for kind, known in IMPLEMENTATIONS.items():
        chosen = value.values() if isinstance(value, dict) else [value]
        if kind in name and any(each is not None and each not in known for each in chosen):
            return f"kernels of a hub or another library are not loaded: write one of {', '.join(known)}"
    most = next((bound for counted, bound in MOST.items() if counted in name), None)
    if most is not None and isinstance(value, int) and value > most:
        return f"at most {most:,} are built"
    return None


def _class_of(path: Path, architecture: str) -> Any:
    """The class of transformers with this name. Raises ConfigurationError for whatever else its module holds."""
    transformers = _import_transformers()
    found = getattr(transformers, architecture, None)
    if found is None:
        raise ConfigurationError(f"{path}: transformers {transformers.__version__} has no class {architecture}")
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model or not found.__module__.startswith("transformers.models.") or found.config_class is None:
        raise ConfigurationError(
            f"{path}: {architecture} is no model of transformers; name one in \"architectures\", for example "
            '["LlamaForCausalLM"]'
        )
    return found


def _build(path: Path, model_class: Any, config: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The model and its configuration."""
    try:
        configuration = model_class.config_class.from_dict(config)
        model: nn.Module = model_class(configuration)
    except Exception as error:  # whatever the code of two hundred models makes of values that cannot be
        said = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{path}: {model_class.__name__} cannot be built from it: {said}") from error
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


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """What a model's code asks the hub for while it is built is an error of the hub's client."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


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

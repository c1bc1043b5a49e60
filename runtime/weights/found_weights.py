"""Found weights: which tensor of the files becomes which of the model, agreed on by all ranks before one is read.

    found = find_weights(model, "llama-8b/")              # headers only; all ranks call it
    found.tensors["model.layers.0.mlp.up_proj.weight"]    # file, dtype, shape, first byte
    for wanted, block in read_blocks(...): ...            # what this rank keeps of each, and no other bytes

Every parameter and every persistent buffer of the model must be in the files, in its shape, and nothing else may be.
Tied parameters are in the files under one of their names or several. Where the model holds the model of the files in an
attribute (`inner.`), its names may begin with that. Values become the dtype of the model.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autopar.errors import ConfigurationError, RankMismatchError
from autopar.layouts.index_blocks import Runs
from autopar.nearest_name import did_you_mean
from autopar.plans.plan_text import format_bytes
from autopar.runtime.consensus import attempt_on_all, gather_from_all
from autopar.runtime.weights.block_reader import BlockReader
from autopar.runtime.weights.safetensors_file import SavedTensor
from autopar.runtime.weights.weight_files import read_weight_files, some_names

log = logging.getLogger(__name__)

_IGNORED = "_keys_to_ignore_on_load_unexpected"
"""What a class of transformers says of names that older files have and nobody reads: patterns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWeights:
    """origin: what the user named. tensors: by every name of a parameter and of a persistent buffer."""

    origin: str
    tensors: Mapping[str, SavedTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTensor:
    """A parameter or buffer of the model, under all its names."""

    names: tuple[str, ...]
    tensor: torch.Tensor


def find_weights(
    model: nn.Module, path: str | Path | None, absent: Mapping[str, nn.Parameter] | None = None
) -> FoundWeights | None:
    """The weights of `model` in a folder, an index or a file; None where `path` is. All ranks call it.

    absent: parameters by name that stand in the model on other ranks only. Raises ConfigurationError, naming file,
    tensor and numbers, and RankMismatchError where ranks found other weights.
    """
    found = attempt_on_all(lambda: None if path is None else _found(model, Path(path), absent or {}), "weight files")
    described = (
        ""
        if found is None
        else repr(sorted((name, str(t.dtype), t.shape, t.start, t.file.name) for name, t in found.tensors.items()))
    )
    digests = gather_from_all(hashlib.sha256(described.encode()).hexdigest(), "weight files")
    strange = [str(member) for member, digest in enumerate(digests) if digest != digests[0]]
    if strange:
        raise RankMismatchError(
            f"ranks {', '.join(strange)} were given other weight files than rank 0, or none (weights={str(path)!r} "
            "here): pass the same files on every rank"
        )
    return found


def _found(model: nn.Module, path: Path, absent: Mapping[str, nn.Parameter]) -> FoundWeights:
    wanted = wanted_tensors(model, absent)
    names = [name for each in wanted for name in each.names]
    tensors = _under(read_weight_files(path), names)
    found: dict[str, SavedTensor] = {}
    missing = []
    for each in wanted:
        saved = next((tensors[name] for name in each.names if name in tensors), None)
        if saved is None:
            missing.append(each.names[0])
            continue
        _check_form(saved, each)
        found |= dict.fromkeys(each.names, saved)
    _check_names(path, model, tensors, names, missing)
    return FoundWeights(origin=str(path), tensors=found)


def wanted_tensors(model: nn.Module, absent: Mapping[str, nn.Parameter]) -> list[WantedTensor]:
    """Parameters and persistent buffers in the order of the model's tree; a tensor of several names comes once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in _tensors(model, absent):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [WantedTensor(names=tuple(found), tensor=tensors[key]) for key, found in names.items()]


def _tensors(model: nn.Module, absent: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            held = absent.get(prefix + name) if parameter is None else parameter
            if held is not None:
                yield prefix + name, held
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


def _under(tensors: dict[str, SavedTensor], names: Sequence[str]) -> dict[str, SavedTensor]:
    """The tensors under the names of the model, which may all begin with the attribute that holds the files' model."""
    if not tensors or not tensors.keys().isdisjoint(names):
        return tensors
    first = next(iter(tensors))
    for name in names:
        prefix = name.removesuffix(first)
        if prefix != name and prefix.endswith(".") and {prefix + each for each in tensors} <= set(names):
            log.info("weights: names of the files stand under %s in the model", prefix.rstrip("."))
            return {prefix + each: saved for each, saved in tensors.items()}
    return tensors


def _check_form(saved: SavedTensor, wanted: WantedTensor) -> None:
    where = f"{saved.file}, tensor {saved.name!r}"
    if saved.shape != tuple(wanted.tensor.shape):
        raise ConfigurationError(
            f"{where} has the shape {list(saved.shape)}, the model's {wanted.names[0]} has "
            f"{list(wanted.tensor.shape)}: build the model with the configuration of the files"
        )
    if _kind(saved.dtype) != _kind(wanted.tensor.dtype):
        raise ConfigurationError(
            f"{where} is {saved.dtype}, the model's {wanted.names[0]} is {wanted.tensor.dtype}: values are converted "
            "between floating types and between integers only; build the model in the types of the files"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "truth values"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "whole"


def _check_names(
    path: Path, model: nn.Module, tensors: Mapping[str, SavedTensor], names: Sequence[str], missing: Sequence[str]
) -> None:
    known = {*names, *(name for name, _ in model.named_buffers(remove_duplicate=False))}
    ignored = [re.compile(pattern) for pattern in getattr(model, _IGNORED, None) or ()]
    unknown = [n for n in tensors if n not in known and not any(pattern.search(n) for pattern in ignored)]
    if not missing and not unknown:
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} of the model's tensors are not there ({some_names(missing)})")
    if unknown:
        near = did_you_mean(unknown[0], missing) if missing else ""
        parts.append(f"{len(unknown)} of its {len(tensors)} are none of the model's ({some_names(unknown)}){near}")
    raise ConfigurationError(
        f"weights={str(path)!r} is of another model: {'; '.join(parts)}. Build the model with the configuration of the "
        "files; where transformers itself renames or joins tensors when it loads (experts), load the folder with "
        "from_pretrained once and write it with save_pretrained(..., save_original_format=False)"
    )


def read_blocks(
    found: FoundWeights,
    wanted: Sequence[WantedTensor],
    runs_of: Callable[[WantedTensor], Sequence[Runs]],
    device: torch.device,
) -> Iterator[tuple[WantedTensor, torch.Tensor]]:
    """Every tensor with its block, in the dtype that the model has, on `device`; no other bytes of the files are read.

    Raises ConfigurationError naming file and tensor.
    """
    with BlockReader() as reader:
        for each in wanted:
            block = reader.read(found.tensors[each.names[0]], runs_of(each))
            yield each, block.to(device, each.tensor.dtype)
        log.info("weights: read %s from %s", format_bytes(reader.bytes_read), found.origin)

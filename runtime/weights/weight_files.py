"""Weight files: a folder of safetensors files, with an index or as one file, and the names that are in it.

    model.safetensors                      all tensors in one file, or
    model.safetensors.index.json           {"weight_map": {name: file}, "metadata": {"total_size": bytes}}
    model-00001-of-00002.safetensors       the files that it names, in the same folder

As transformers, diffusers and the Hugging Face hub have them. Headers are read, and no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import ConfigurationError
from autopar.files import decoded_json, file_content
from autopar.nearest_name import did_you_mean
from autopar.runtime.weights.safetensors_file import SavedTensor, read_header

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
ONE_FILE, INDEX_FILE = f"model{SUFFIX}", f"model{INDEX_SUFFIX}"
WEIGHT_MAP = "weight_map"


def read_weight_files(path: Path) -> dict[str, SavedTensor]:
    """The tensors in a folder, an index or a single file, by their names there.

    Raises ConfigurationError where there are none, an index and its files disagree, or a file is damaged.
    """
    found = _file_or_index(path)
    if not found.name.endswith(INDEX_SUFFIX):
        return read_header(found)
    weight_map = _weight_map(found)
    headers = {name: read_header(found.parent / name) for name in sorted(set(weight_map.values()))}
    _check_index(found, weight_map, headers)
    return {name: headers[file][name] for name, file in weight_map.items()}


def _file_or_index(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigurationError(f"weights={str(path)!r}: there is no such folder or file")
    for name in (ONE_FILE, INDEX_FILE):
        if (path / name).is_file():
            return path / name
    for suffix in (INDEX_SUFFIX, SUFFIX):
        if len(others := sorted(path.glob(f"*{suffix}"))) == 1:
            return others[0]
    raise ConfigurationError(f"weights={str(path)!r}: the folder has {_what_is_there(path)}")


def _what_is_there(folder: Path) -> str:
    if several := sorted(file.name for file in folder.glob(f"*{SUFFIX}")):
        return f"several files and no {INDEX_FILE} ({', '.join(several[:3])}): name one of them"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            "pickled weights and no safetensors: load them once with transformers (or torch.load) and save them with "
            "save_pretrained"
        )
    return f"neither {ONE_FILE} nor {INDEX_FILE}"


def _weight_map(index: Path) -> dict[str, str]:
    document = decoded_json(file_content(index, str(index)), str(index))
    weight_map = document.get(WEIGHT_MAP) if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConfigurationError(f"{index} is damaged: it has no {WEIGHT_MAP!r} of names and files")
    if outside := sorted({file for file in weight_map.values() if Path(file).name != file}):
        raise ConfigurationError(f"{index} names {outside[0]!r}, which is no file beside it")
    return weight_map


def _check_index(index: Path, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, Any]]) -> None:
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ConfigurationError(
                f"{index} says that {name!r} is in {file}, which has none of that name"
                f"{did_you_mean(name, headers[file])}; copy both again"
            )
    for file, tensors in headers.items():
        if unlisted := [name for name in tensors if weight_map.get(name) != file]:
            raise ConfigurationError(
                f"{file} holds {some_names(unlisted)}, which {index} does not say of it; copy both"
            )


def some_names(names: Sequence[str], shown: int = 5) -> str:
    """The first of many names."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")

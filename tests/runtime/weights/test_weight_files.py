"""A folder, an index or a file is found; an index and files that disagree are refused by both names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from autopar.errors import ConfigurationError
from autopar.runtime.weights.weight_files import read_weight_files

INDEX = "model.safetensors.index.json"


def shard(folder: Path, file: str, *names: str) -> None:
    safetensors.torch.save_file({name: torch.ones(2) for name in names}, folder / file)


def index(folder: Path, **weight_map: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def sharded(folder: Path) -> None:
    shard(folder, "one.safetensors", "a", "b")
    shard(folder, "two.safetensors", "c")
    index(folder, a="one.safetensors", b="one.safetensors", c="two.safetensors")


def test_one_file_and_shards_are_found_by_their_folder(tmp_path: Path) -> None:
    sharded(tmp_path)
    for path in (tmp_path, tmp_path / INDEX):
        assert {name: saved.file.name for name, saved in read_weight_files(path).items()} == {
            "a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors",
        }  # fmt: skip
    shard(tmp_path, "model.safetensors", "d")
    assert read_weight_files(tmp_path).keys() == {"d"}, "as transformers looks for them"
    assert read_weight_files(tmp_path / "two.safetensors").keys() == {"c"}


def test_a_single_file_of_another_name_is_found(tmp_path: Path) -> None:
    shard(tmp_path, "diffusion_pytorch_model.safetensors", "a")
    assert read_weight_files(tmp_path).keys() == {"a"}


def _pickled(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")


def _two(folder: Path) -> None:
    shard(folder, "one.safetensors", "a")
    shard(folder, "two.safetensors", "b")


def _lost(folder: Path) -> None:
    sharded(folder)
    (folder / "two.safetensors").unlink()


def _moved(folder: Path) -> None:
    sharded(folder)
    index(folder, a="one.safetensors", b="one.safetensors", d="two.safetensors", c="two.safetensors")


def _unlisted(folder: Path) -> None:
    sharded(folder)
    index(folder, a="one.safetensors", c="two.safetensors")


def _outside(folder: Path) -> None:
    index(folder, a="../one.safetensors")


def _no_map(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": [1]}')


def _cut(folder: Path) -> None:
    sharded(folder)
    (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: None, "neither model.safetensors nor model.safetensors.index.json"),
        (_pickled, "pickled weights and no safetensors"),
        (_two, "several files and no model.safetensors.index.json (one.safetensors, two.safetensors)"),
        (_lost, "two.safetensors: No such file"),
        (_moved, "'d' is in two.safetensors, which has none of that name"),
        (_unlisted, "one.safetensors holds b, which"),
        (_outside, "names '../one.safetensors', which is no file beside it"),
        (_no_map, "it has no 'weight_map'"),
        (_cut, "JSON is malformed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_fit_together_is_refused(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    damage(tmp_path)
    with pytest.raises(ConfigurationError) as error:
        read_weight_files(tmp_path)
    assert words in str(error.value), error.value


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no such folder or file"):
        read_weight_files(tmp_path / "none")

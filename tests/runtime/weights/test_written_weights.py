"""Folders that are written: shards of a bounded size, in place of older ones, whole or not at all."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError
from autopar.runtime.weights.safetensors_file import read_header
from tests.distributed.models import TiedModel, tied_model, tokens

written_weights = import_module("autopar.runtime.weights.written_weights")
INDEX = "model.safetensors.index.json"
CPU = torch.device("cpu")


def save(model: nn.Module, folder: Path, most_bytes: float) -> list[str]:
    """The names of the files in the folder."""
    written_weights.save_weights(model, {}, folder, CPU, most_bytes=most_bytes)
    return sorted(entry.name for entry in folder.iterdir())


def load(folder: Path) -> dict[str, torch.Tensor]:
    """By the package."""
    return {name: t for file in folder.glob("*.safetensors") for name, t in safetensors.torch.load_file(file).items()}


def test_shards_hold_every_tensor_once_and_the_index_says_where(tmp_path: Path) -> None:
    model = tied_model()
    assert save(model, tmp_path, 800) == [*(f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)), INDEX]
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    found = load(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
    for name, file in index["weight_map"].items():
        assert name in safetensors.torch.load_file(tmp_path / file)
    for file in tmp_path.glob("*.safetensors"):
        sizes = [tensor.numel() * tensor.element_size() for tensor in safetensors.torch.load_file(file).values()]
        assert sum(sizes) <= 800 or len(sizes) == 1


def test_what_was_there_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    five = save(tied_model(), tmp_path, 800)
    assert save(tied_model(), tmp_path, 1e9) == ["model.safetensors", "notes.txt"]
    assert save(tied_model(), tmp_path, 800) == five


def test_mixed_types_and_strided_tensors_are_written_as_they_are(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_parameter("turned", nn.Parameter(torch.arange(6.0).view(2, 3).t()))
    model.register_buffer("small", torch.tensor(1.5, dtype=torch.bfloat16))
    model.register_buffer("empty", torch.empty(0, 3))
    save(model, tmp_path, 1e9)
    found = load(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    places = read_header(tmp_path / "model.safetensors").values()
    assert all(saved.start % saved.dtype.itemsize == 0 for saved in places), "so that other readers may map them"


def test_a_save_that_fails_leaves_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tied_model(seed=1), tmp_path, 1e9)
    before = load(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigurationError, match=r"cannot write weights to .*: No space left on device"):
        save(tied_model(seed=2), tmp_path, 800)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    assert all(torch.equal(before[name], tensor) for name, tensor in load(tmp_path).items())


def test_a_save_that_is_killed_between_its_renames_leaves_no_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tied_model(seed=1), tmp_path, 800)
    moved: list[object] = []
    replace = written_weights.os.replace

    def killed(source: object, target: object) -> None:
        moved.append(target)
        if len(moved) == 3:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(written_weights.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tied_model(seed=2), tmp_path, 800)
    with torch.device("meta"):
        model = TiedModel()
    with pytest.raises(ConfigurationError, match="several files and no model"):
        autopar.compile(model, tokens(0), weights=tmp_path)


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".weights-0123abcd").mkdir()
    (tmp_path / ".weights-mine").mkdir()
    assert save(tied_model(), tmp_path, 1e9) == [".weights-mine", "model.safetensors"]


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigurationError, match="it is a file; name a folder"):
        save(tied_model(), tmp_path / "out", 1e9)


def test_what_the_format_cannot_hold_is_named_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ConfigurationError, match=r"wide is torch\.complex128"):
        save(model, tmp_path / "out", 1e9)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["many", 0, -1, float("inf"), True])
def test_a_size_that_is_none_is_refused(size: object, tmp_path: Path) -> None:
    module = autopar.compile(nn.Linear(4, 4), torch.ones(2, 4), loss_fn=lambda out, _: out.sum(), mode="fast")
    with pytest.raises(ConfigurationError, match="max_shard_size="):
        module.save_weights(tmp_path, max_shard_size=size)

"""Headers are those of the format; one that is damaged is refused by file, tensor and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from autopar.errors import ConfigurationError
from autopar.runtime.weights.safetensors_file import DTYPES, TensorForm, header_bytes, read_header

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(True), "c": torch.empty(0, 4, dtype=torch.bfloat16)}


def write(path: Path, header: Any, content: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + content)
    return path


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "one.safetensors")
    content = (tmp_path / "one.safetensors").read_bytes()
    found = read_header(tmp_path / "one.safetensors")
    assert {name: (saved.dtype, saved.shape) for name, saved in found.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()
    }
    assert content[found["a"].start :][:24] == TENSORS["a"].numpy().tobytes()


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    made = {word: torch.zeros(3, 2, dtype=dtype) for word, dtype in DTYPES.items()}
    forms = [TensorForm(name=name, dtype=tensor.dtype, shape=(3, 2)) for name, tensor in made.items()]
    path = tmp_path / "one.safetensors"
    path.write_bytes(header_bytes(forms) + bytes(sum(form.size for form in forms)))
    found = safetensors.torch.load_file(path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: made[name].dtype for name in made}
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers reads no other"


def test_a_dtype_without_a_word_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"w is torch.complex128, which no safetensors file holds"):
        header_bytes([TensorForm(name="w", dtype=torch.complex128, shape=())])


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file"),
    "a folder": (lambda path: path.mkdir(), "is a folder"),
    "empty": (lambda path: path.write_bytes(b""), "it has 0 bytes"),
    "no such length": (lambda path: write(path, {}, b"", length=1 << 40), "a header of 1,099,511,627,776"),
    "no JSON": (lambda path: write(path, b"{not JSON", b""), "JSON is malformed"),
    "no object": (lambda path: write(path, [1], b""), "no JSON object"),
    "twice": (lambda path: write(path, b'{"w": 1, "w": 2}', b""), "'w' stands twice"),
    "no entry": (lambda path: write(path, {"w": 3}, b""), "tensor 'w': its entry in the header is damaged"),
    "shape": (lambda path: write(path, {"w": entry(shape=[-2])}, bytes(8)), "its entry in the header is damaged"),
    "dtype": (lambda path: write(path, {"w": entry(dtype="F4")}, bytes(8)), "has the dtype F4"),
    "size": (lambda path: write(path, {"w": entry(end=12)}, bytes(12)), "takes 8 bytes, its offsets [0, 12] hold 12"),
    "cut off": (lambda path: write(path, {"w": entry()}, bytes(7)), "the file has"),
    "longer": (lambda path: write(path, {"w": entry()}, bytes(9)), "1 bytes behind its last tensor"),
    "a hole": (lambda path: write(path, {"w": entry(4, 12)}, bytes(12)), "leaves 4 bytes before it"),
    "overlap": (lambda path: write(path, {"v": entry(), "w": entry(4, 12)}, bytes(12)), "overlaps the one before it"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_by_what_is_wrong(name: str, tmp_path: Path) -> None:
    damage, words = DAMAGED[name]
    path = tmp_path / "model.safetensors"
    damage(path)
    with pytest.raises(ConfigurationError) as error:
        read_header(path)
    assert str(path) in str(error.value)
    assert words in str(error.value), error.value


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    """So that what the cases above catch is the damage."""
    path = write(tmp_path / "w.safetensors", {"v": entry(), "w": entry(8, 16), "__metadata__": {"a": "b"}}, bytes(16))
    assert {name: saved.shape for name, saved in read_header(path).items()} == {"v": (2,), "w": (2,)}

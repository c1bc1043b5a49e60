"""Names, shapes and types of files and model are compared before anything is read."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError
from tests.distributed.models import TiedModel

found_weights = import_module("autopar.runtime.weights.found_weights")


class Small(nn.Module):
    """Two weights, a counter, and a table that no file has. forward(x (B, 4)) -> scalar."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(float(width)), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(float(self.table.numel())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.table).sum() + self.steps


def saved(folder: Path, **changes: Any) -> Path:
    """The folder with a small model's weights, and the changes: None takes one away."""
    torch.manual_seed(1)
    tensors = {**Small().state_dict(), **changes}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    safetensors.torch.save_file(kept, folder / "model.safetensors")
    return folder


def test_parameters_and_persistent_buffers_are_found(tmp_path: Path) -> None:
    found = found_weights.find_weights(Small(), saved(tmp_path))
    assert found.tensors.keys() == {"layer.weight", "layer.bias", "steps"}
    assert found_weights.find_weights(Small(), None) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer.bias": None}, "1 of the model's tensors are not there (layer.bias)"),
        ({"layer.extra": torch.ones(1)}, "1 of its 4 are none of the model's (layer.extra)"),
        (
            {"layer.bias": None, "layer.bais": torch.ones(4)},
            '(layer.bais); did you mean "layer.bias"?',
        ),
        ({"layer.weight": torch.ones(4, 5)}, "has the shape [4, 5], the model's layer.weight has [4, 4]"),
        ({"layer.weight": torch.ones(4, 4).int()}, "is torch.int32, the model's layer.weight is torch.float32"),
        ({"steps": torch.tensor(True)}, "is torch.bool, the model's steps is torch.int64"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_another_model_is_refused_by_what_differs(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        autopar.compile(Small(), (torch.ones(2, 4),), weights=saved(tmp_path, **changes))
    assert words in str(error.value), error.value
    assert str(tmp_path) in str(error.value)


def test_a_buffer_that_older_files_had_is_passed_over(tmp_path: Path) -> None:
    model = Small()
    found = found_weights.find_weights(model, saved(tmp_path, table=torch.zeros(4)))
    assert "table" not in found.tensors
    model._keys_to_ignore_on_load_unexpected = [r"masks\.\d"]
    found_weights.find_weights(model, saved(tmp_path, **{"masks.3": torch.ones(1)}))


def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path) -> None:
    state = TiedModel().state_dict()
    for left_out in ("embedding.weight", "head.weight"):
        kept = {name: tensor for name, tensor in state.items() if name != left_out}
        safetensors.torch.save_file(kept, tmp_path / "model.safetensors")
        found = found_weights.find_weights(TiedModel(), tmp_path)
        assert found.tensors["embedding.weight"] is found.tensors["head.weight"]


def test_a_model_inside_of_another_takes_its_files(tmp_path: Path) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Small()

    found = found_weights.find_weights(Around(), saved(tmp_path))
    assert found.tensors["inner.layer.bias"].name == "layer.bias"


@pytest.mark.parametrize("on_meta", [True, False])
def test_a_compiled_model_has_the_values_of_the_files(on_meta: bool, tmp_path: Path) -> None:
    torch.manual_seed(2)
    with torch.device("meta" if on_meta else "cpu"):
        model = Small().to(torch.bfloat16)
    saved(tmp_path, steps=torch.tensor(7))
    module = autopar.compile(model, (torch.ones(2, 4, dtype=torch.bfloat16),), weights=tmp_path, mode="fast")
    torch.manual_seed(1)
    expected = Small().to(torch.bfloat16)
    assert module.get_parameter("layer.weight").dtype == torch.bfloat16
    assert torch.equal(module.get_parameter("layer.weight"), expected.layer.weight)
    assert torch.equal(module.get_buffer("table"), expected.table)
    assert module.get_buffer("steps") == 7
    saved(tmp_path, **{"layer.bias": torch.full((4,), 3.0)})
    module.load_weights(tmp_path)
    assert torch.equal(module.get_parameter("layer.bias").float(), torch.full((4,), 3.0))
    assert module.get_buffer("steps") == 0


def test_a_load_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = autopar.compile(Small(), (torch.ones(2, 4),), weights=saved(tmp_path), mode="fast")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    saved(tmp_path, **{"layer.bias": torch.full((4,), 3.0), "steps": torch.tensor(5)})
    whole = found_weights.find_weights(module.original, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])  # behind the header's check
    monkeypatch.setattr(import_module("autopar.runtime.weights.planned_model"), "find_weights", lambda *_: whole)
    with pytest.raises(ConfigurationError, match="it ends at byte"):
        module.load_weights(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())

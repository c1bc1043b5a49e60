"""Whole weights for files, and where blocks lie beside them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.integrations.states import folder_beside, folder_in, remove_beside, whole_state


def test_whole_state_is_that_of_the_plain_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    found = whole_state(autopar.compile(model, torch.randn(8, 4)))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is torch.Tensor
        assert torch.equal(found[name], value), name


def test_folders_stand_in_a_checkpoint_or_beside_its_file() -> None:
    assert folder_in("run") == Path("run/autopar")
    assert folder_in("run", 1) == Path("run/autopar-1")
    assert folder_beside("run/last.ckpt") == Path("run/last.autopar")
    assert folder_beside("run/epoch=1.2.ckpt", 2) == Path("run/epoch=1.2.autopar-2")


def test_removing_takes_what_lies_beside_that_file_alone(tmp_path: Path) -> None:
    for name in ("a.autopar", "a.autopar-1", "ab.autopar", "a.other"):
        (tmp_path / name).mkdir()
    remove_beside(tmp_path / "a.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.other", "ab.autopar"]

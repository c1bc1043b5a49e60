"""Old names warn with the new one, and go when the rule says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.renamed import RENAMED, Renamed
from autopar.runtime.weights.planned_model import PlannedModel

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def overdue(version: tuple[int, int]) -> list[str]:
    """Old names that this version must not have any more."""
    return [each.old for each in RENAMED if version >= each.gone]


def test_no_old_name_outlives_its_time() -> None:
    found = re.search(r'^version = "(\d+)\.(\d+)', PROJECT.read_text(), re.MULTILINE)
    assert found is not None
    assert overdue((int(found[1]), int(found[2]))) == []
    assert overdue((9, 0)) == [each.old for each in RENAMED]


def test_an_old_name_says_its_new_one_where_it_is_used() -> None:
    class Model(PlannedModel):
        def full(self, values: object) -> object:
            return values

    x = torch.ones(2)
    with pytest.warns(DeprecationWarning, match=r"is called module\.full since .* until autopar 0.3") as told:
        assert Model.gather(nn.Module.__new__(Model), x) is x
    assert told[0].filename == __file__
    assert str(Renamed(old="a", new="b", since=(1, 4))).endswith("until autopar 1.6")

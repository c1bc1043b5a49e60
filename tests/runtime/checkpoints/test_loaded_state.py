"""In whose layout a value is read: the tensor's that is there, if it is one like it, else its parameter's."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from autopar.runtime.checkpoints.loaded_state import _likes
from autopar.runtime.checkpoints.manifest import TensorForm
from autopar.runtime.checkpoints.training_state import STATE
from autopar.runtime.parallel_module import ParallelModule

MOMENT, STEP = STATE + "weight.exp_avg", STATE + "weight.step"
SAVED = TensorForm(shape=(4, 4), dtype="float32")


def like(name: str, here: object, form: TensorForm | None = SAVED) -> tuple[torch.Tensor | None, nn.Linear]:
    """(the tensor whose layout a value gets where the state holds `here`, the layer whose state it is)."""
    layer = nn.Linear(4, 4)
    found = _likes({name: form}, {name: cast(Any, here)}, cast(ParallelModule, layer))
    return found[name], layer


@pytest.mark.parametrize("here", [torch.zeros(1), torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(16), None, 0.5])
def test_state_that_was_saved_in_another_form_takes_the_layout_of_its_parameter(here: object) -> None:
    found, layer = like(MOMENT, here)
    assert found is layer.weight


def test_state_of_the_same_form_is_read_as_it_lies() -> None:
    here = torch.zeros(4, 4)
    assert like(MOMENT, here)[0] is here


def test_what_counts_steps_has_no_layout_of_its_parameter() -> None:
    assert like(STEP, 3.0, TensorForm(shape=(), dtype="float32"))[0] is None


def test_what_is_no_state_of_an_optimizer_is_read_as_it_lies() -> None:
    here = torch.zeros(2)
    assert like("model.weight", here)[0] is here

"""Arguments of other types are refused by name, before anything is captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.request.argument_types import ARGUMENT_TYPES, check_arguments

SOUND: dict[str, tuple[Any, ...]] = {
    "loss_fn": (None, torch.nn.functional.mse_loss),
    "optimizer": (
        None,
        "AdamW",
        torch.optim.AdamW,
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
        lambda p: None,
    ),
    "mesh": (None, (2, 4), [8]),
    "dims": (None, {}, {"tp": 4}, {"pp": [1, 3]}),
    "plan": (None, "plan.json", Path("plan.json")),
    "batch": ("global", "local"),
    "batch_dims": (None, {"mask": None, "tokens": 1}),
    "differentiable": ((), ["logits"]),
    "strict": (True, False),
    "discover": (True, False),
    "branches": (None, "example"),
    "deterministic": (True, False, 8),
    "verify": (True, False),
    "cache_dir": (None, "plans", Path("plans")),
    "micro_batches": (None, 4),
    "kernels": (None, (), ["rms_norm", "cross_entropy"]),
    "schedule": (None, "1f1b"),
    "warm_start": (None, "plan.json"),
    "scaler": (None, torch.amp.GradScaler("cpu", enabled=False)),
    "sync": ("broadcast", "check"),
    "outputs": ("lazy", "gather"),
    "weights": (None, "folder", Path("folder")),
    "check_calls": (0, 50),
    "cuda_graphs": (True, False),
}
UNSOUND: dict[str, tuple[Any, ...]] = {
    "loss_fn": (3, "mse"),
    "optimizer": (3, ["adamw"]),
    "mesh": (4, "four", (2.0, 4), (True,)),
    "dims": ([4], {4: "tp"}, "tp=4"),
    "plan": (3, {}),
    "batch": ("mine", None),
    "batch_dims": ({"x": "first"}, {0: 0}, [0], {"x": True}),
    "differentiable": (True, "logits", [3], None),
    "strict": ("yes", None),
    "discover": ("yes", 1, None),
    "branches": ("first", True),
    "deterministic": ("yes", 0.5, None),
    "verify": (1, None),
    "cache_dir": (3,),
    "micro_batches": (0.5, "two", True),
    "kernels": ("rms_norm", [1], True),
    "schedule": (1,),
    "warm_start": (3, {}),
    "scaler": (1024.0,),
    "sync": ("always", None),
    "outputs": ("plain", True, None),
    "weights": (3, {"w": 1}),
    "check_calls": (-1, 0.5, None, True),
    "cuda_graphs": ("yes", 1, None),
}


def test_every_argument_is_tried() -> None:
    assert SOUND.keys() == UNSOUND.keys() == ARGUMENT_TYPES.keys()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SOUND.items() for value in values])
def test_sound_values_pass(name: str, value: Any) -> None:
    check_arguments(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in UNSOUND.items() for value in values])
def test_others_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(autopar.ConfigurationError, match=rf"^{name}=.*: write "):
        check_arguments(**{name: value})


@pytest.mark.parametrize("argument", ["dims", "mesh", "micro_batches", "scaler", "plan"])
def test_compile_asks_before_it_captures(argument: str) -> None:
    with pytest.raises(autopar.ConfigurationError, match=f"^{argument}="):
        autopar.compile(nn.Linear(2, 2), (torch.ones(2, 2),), **{argument: "x" if argument != "plan" else 3})

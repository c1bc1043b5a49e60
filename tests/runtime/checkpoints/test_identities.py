"""A checkpoint of another model or optimizer is refused with the names that differ, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.runtime.checkpoints import checkpoint, identities
from tests.runtime.checkpoints.small_runs import bits, compiled, filled, trained


def saved(folder: Path, **sizes: int) -> Path:
    """A checkpoint of a run of two steps."""
    module = compiled(**sizes)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    trained(module, optimizer, range(2))
    return autopar.save(folder, module, optimizer, extra={"epoch": 3})


def adam(module: autopar.ParallelModule, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1, **options)


def in_two_groups(module: autopar.ParallelModule) -> torch.optim.Optimizer:
    first, *others = module.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.1)


def without_head(module: autopar.ParallelModule) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for name, p in module.named_parameters() if "head" not in name], lr=0.1)


CASES: dict[str, tuple[dict[str, int], dict[str, int], Callable[..., torch.optim.Optimizer], str]] = {
    "three layers into two": ({"count": 3}, {}, adam, r"model.layers.2.weight: float32 \[4, 4\] in .*, nothing here"),
    "two layers into three": ({}, {"count": 3}, adam, r"model.layers.2.weight: nothing in the checkpoint, float32"),
    "another width": ({"width": 5}, {}, adam, r"model.head.weight: float32 \[5, 4\] in .*, float32 \[3, 4\] here"),
    "another class": ({}, {}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "optimizer: AdamW in .*, SGD here"),
    "other groups": ({}, {}, in_two_groups, "1 groups in .*, 2 here.*groups.head.bias: in group 0 in .* group 1"),
    "a smaller optimizer": ({}, {}, without_head, "exp_avg: .*, head.weight is not in the optimizer here"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named_and_nothing_is_changed(tmp_path: Path, case: str) -> None:
    there, here, made, message = CASES[case]
    folder = saved(tmp_path / "run", **there)
    module = compiled(**here)
    optimizer = made(module)
    filled(module, 5.0)
    before = bits(module, optimizer)
    with pytest.raises(autopar.ConfigurationError, match=f"nothing was changed.*{message}"):
        autopar.load(folder, module, optimizer)
    assert bits(module, optimizer) == before


def test_uncompared_three_layers_load_into_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: what was compared is not looked at."""
    folder = saved(tmp_path / "run", count=3)
    module = compiled()
    before = bits(module)
    monkeypatch.setattr(checkpoint.identities, "refuse", lambda *_: None)
    autopar.load(folder, module, adam(module))
    assert bits(module) != before


def test_what_agrees_is_taken_when_asked_for_and_the_rest_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", count=3, width=5)
    there = bits(compiled(count=3, width=5))
    module = compiled()
    optimizer = adam(module)
    filled(module, 5.0)
    before = bits(module)
    loaded = autopar.load(folder, module, optimizer, extra={}, strict=False)
    assert loaded.extra == {"epoch": 3}
    after = bits(module, optimizer)
    differing = {"model.layers.2.weight", "model.layers.2.bias", "model.head.weight", "model.head.bias"}
    assert {name for name in loaded.left_out if name.startswith("model.")} == differing
    assert all(after[name] == (before if "head" in name else there)[name] for name in before if "model" in name)
    assert "optimizer.state.layers.0.weight.exp_avg" in after
    assert not [name for name in after if name.startswith("optimizer.state.head")], "whole or not at all"
    trained(module, optimizer, range(1))


def test_state_that_is_absent_stays_absent(tmp_path: Path) -> None:
    module = compiled()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    autopar.save(tmp_path / "run", module, optimizer)
    for group in optimizer.param_groups:
        group.update(lr=3.0, momentum=0.9)
    trained(module, optimizer, range(1))
    assert optimizer.state
    autopar.load(tmp_path / "run", module, optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["momentum"] == 0


def test_an_optimizer_that_was_not_saved_is_missed(tmp_path: Path) -> None:
    module = compiled()
    autopar.save(tmp_path / "run", module)
    with pytest.raises(autopar.ConfigurationError, match="optimizer: nothing in the checkpoint, AdamW here"):
        autopar.load(tmp_path / "run", module, adam(module))
    left_out = autopar.load(tmp_path / "run", module, adam(module), strict=False).left_out
    assert left_out == {identities.OPTIMIZER: "nothing in the checkpoint, AdamW here"}


def test_state_of_other_tensors_is_not_lost_in_silence(tmp_path: Path) -> None:
    module = compiled()
    other = torch.nn.Parameter(torch.ones(7))
    optimizer = torch.optim.SGD([*module.parameters(), other], lr=0.1, momentum=0.9)
    other.grad = torch.ones(7)
    optimizer.step()
    with pytest.raises(autopar.ConfigurationError, match=r"a tensor \[7\] that is no parameter of this module"):
        autopar.save(tmp_path / "run", module, optimizer)
    assert not (tmp_path / "run").exists()

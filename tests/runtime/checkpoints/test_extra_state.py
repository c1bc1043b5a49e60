"""What users keep beside the model comes back as it was, or is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

import autopar
from autopar._compat import lone_device_mesh
from tests.runtime.checkpoints.small_runs import bits, compiled, filled


class Sampler:
    """Keeps a position; refuses one above its end."""

    def __init__(self, position: int, end: int = 100) -> None:
        self.position, self.end = position, end

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        if self.position > self.end:
            raise IndexError(f"{self.position} is behind the end")


def test_plain_data_comes_back_as_it_was(tmp_path: Path) -> None:
    plain = {"none": None, "inf": float("inf"), "pair": (1, [2.5, "x"]), "counts": Counter({3: 1}), "by": {1: b"b"}}
    autopar.save(tmp_path / "run", compiled(), extra={**plain, "tensor": torch.arange(3)})
    found = dict(autopar.load(tmp_path / "run", compiled()).extra)
    assert found.pop("tensor").tolist() == [0, 1, 2]
    assert found == plain


@pytest.mark.parametrize("value", [Sampler, lambda: 1, object()], ids=["class", "function", "object"])
def test_what_is_no_data_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(autopar.ConfigurationError, match=r"extra.mine holds a .*, which is not read back as data"):
        autopar.save(tmp_path / "run", compiled(), extra={"mine": {"deep": [value]}})


def test_tensors_that_are_spread_are_refused(tmp_path: Path) -> None:
    mesh = lone_device_mesh("cpu", ("one",))
    spread = {"weight": DTensor.from_local(torch.ones(2), mesh, (TorchReplicate(),), run_check=False)}
    with pytest.raises(autopar.ConfigurationError, match=r"extra.average holds a DTensor"):
        autopar.save(tmp_path / "run", compiled(), extra={"average": spread})


def test_where_one_refuses_its_state_nothing_is_changed(tmp_path: Path) -> None:
    module, first, second = compiled(), Sampler(7), Sampler(50)
    autopar.save(tmp_path / "run", module, extra={"first": first, "second": second})
    filled(module, 5.0)
    before = bits(module)
    first, second = Sampler(1), Sampler(2, end=9)
    with pytest.raises(IndexError, match="50 is behind the end"):
        autopar.load(tmp_path / "run", module, extra={"first": first, "second": second})
    assert (first.position, second.position) == (1, 2)
    assert bits(module) == before


def test_names_that_were_not_saved_and_values_that_take_nothing_are_refused(tmp_path: Path) -> None:
    autopar.save(tmp_path / "run", compiled(), extra={"epoch": 1})
    with pytest.raises(autopar.ConfigurationError, match=r"extra.sampler: nothing in the checkpoint"):
        autopar.load(tmp_path / "run", compiled(), extra={"sampler": Sampler(1)})
    with pytest.raises(autopar.ConfigurationError, match="is a int without load_state_dict"):
        autopar.load(tmp_path / "run", compiled(), extra={"epoch": 1})


def test_a_stateful_data_loader_goes_on_behind_its_last_batch(tmp_path: Path) -> None:
    reason = "torchdata is not installed: pip install 'autopar[data]'"
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason=reason)

    def loader() -> Any:
        torch.manual_seed(5)
        return loaders.StatefulDataLoader(list(range(20)), batch_size=4, shuffle=True)

    running = loader()
    rows = iter(running)
    next(rows), next(rows)
    autopar.save(tmp_path / "run", compiled(), extra={"loader": autopar.PerDataRank(running)})
    rest = [batch.tolist() for batch in rows]
    again = loader()
    autopar.load(tmp_path / "run", compiled(), extra={"loader": autopar.PerDataRank(again)})
    torch.manual_seed(6)
    assert [batch.tolist() for batch in again] == rest
    assert len(rest) == 3

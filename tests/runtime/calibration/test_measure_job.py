"""What a job is measured with: sends to a neighbour move as many bytes as they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.runtime.calibration import measure_job


@pytest.mark.parametrize(("mine", "before", "behind"), [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_a_shift_takes_from_the_one_before_as_much_as_it_sends_to_the_next(
    mine: int, before: int, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, int]] = []

    def receive(block: torch.Tensor, *, group: Any, group_src: int) -> Any:
        calls.append(("receive", group_src, block.nbytes))
        return SimpleNamespace(wait=lambda: calls.append(("received", group_src, block.nbytes)))

    def send(block: torch.Tensor, *, group: Any, group_dst: int) -> Any:
        calls.append(("send", group_dst, block.nbytes))
        return SimpleNamespace(wait=lambda: calls.append(("sent", group_dst, block.nbytes)))

    monkeypatch.setattr(measure_job, "dist", SimpleNamespace(get_rank=lambda group: mine, irecv=receive, isend=send))
    group: Any = SimpleNamespace(size=lambda: 3)
    measure_job.shift(group, 64)
    assert calls[:2] == [("receive", before, 64), ("send", behind, 64)]
    assert sorted(calls[2:]) == [("received", before, 64), ("sent", behind, 64)]

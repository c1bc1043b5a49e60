"""The demo's model learns, and says every step."""

from __future__ import annotations

import torch

from autopar.demo.training import _train


def test_the_loss_falls_and_every_step_is_reported() -> None:
    reported: list[int] = []
    random = torch.get_rng_state()
    found = _train(reported.append, threads=1, planned=False, steps=8)
    torch.set_rng_state(random)
    assert reported == list(range(1, 9))
    assert len(found.losses) == 8
    assert found.losses[-1] < found.losses[0] - 0.5
    assert found.plan is None

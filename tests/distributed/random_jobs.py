"""Jobs of the workers that draw: one training step of a small module per random operator."""

from __future__ import annotations

from typing import Any

import torch

from tests.capture.random_models import DRAWS, Drawing
from tests.distributed.captured_once import capture_once, compile_once, prepared_by


def captured(names: tuple[str, ...], **_: Any) -> bool:
    """Capture what draws."""
    made = [capture_once(f"drawing {name}", Drawing(DRAWS[name]), torch.randn(4, 5, 6)) for name in names]
    return any(made)


@prepared_by(captured)
def steps(names: tuple[str, ...], dims: dict[str, int] | None) -> dict[str, list[float]]:
    """Per operator: the losses of two steps, then the norm of the weight's gradient after them."""
    found = {}
    for name in names:
        torch.manual_seed(3)
        model, x = Drawing(DRAWS[name]), torch.randn(4, 5, 6)
        module = compile_once(f"drawing {name}", model, x, dims=dims)
        losses = [module(x) for _ in range(2)]
        for loss in losses:
            loss.backward()
        weight = dict(module.named_parameters())["linear.weight"].grad
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        found[name] = [*(float(loss.detach()) for loss in losses), float(whole.norm())]
    return found

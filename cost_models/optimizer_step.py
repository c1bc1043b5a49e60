"""Buffers of an optimizer's step: what it allocates beside parameters, gradients and state, and frees again.

    AdamW, one parameter after the other (CPU):     sqrt and quotient of one, and the quotient of the one before
    AdamW, all parameters in one call (CUDA):       one root of every parameter

torch takes the loop on CPUs and `foreach` on CUDA unless told otherwise. The counts below are copies of a parameter;
`tests/cost_models/test_optimizer_step.py` measures every class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

DeviceKind: TypeAlias = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Copies of a parameter that live at once: of the one being updated and of the one before it in a loop over
    parameters, and of every parameter in a `foreach` step."""

    own: float
    previous: float
    foreach: float


TEMPORARIES: Mapping[str, Temporaries] = {
    "SGD": Temporaries(0, 0, 0),
    "Adam": Temporaries(2, 1, 1),
    "AdamW": Temporaries(2, 1, 1),
    "NAdam": Temporaries(2, 1, 1),
    "RAdam": Temporaries(2, 0, 1),
    "Adamax": Temporaries(1, 0, 1),
    "RMSprop": Temporaries(1, 1, 1),
    "Adagrad": Temporaries(1, 1, 2),
    "Adadelta": Temporaries(1, 2, 2),
    "Rprop": Temporaries(3, 0, 2),
    "ASGD": Temporaries(0, 0, 1),
}
"""By class of torch.optim (torch 2.13)."""
FUSED = Temporaries(0, 0, 0)
"""A kernel that updates in one pass, as those of 8-bit optimizers do."""


def temporaries_of(optimizer: str) -> Temporaries:
    """Those of a class by its name; classes outside of the table count as Adam."""
    return FUSED if optimizer.endswith("8bit") else TEMPORARIES.get(optimizer, TEMPORARIES["Adam"])


def step_buffer_bytes(parameters: Sequence[tuple[float, Temporaries]], device_kind: DeviceKind) -> float:
    """Most bytes of temporaries during one step.

    parameters: (bytes, temporaries) of the trained parameters of one device, in the order of the optimizer.
    """
    if device_kind == "cuda":
        return sum(copies.foreach * nbytes for nbytes, copies in parameters)
    most = before = 0.0
    for nbytes, copies in parameters:
        most = max(most, copies.own * nbytes + before)
        before = copies.previous * nbytes
    return most

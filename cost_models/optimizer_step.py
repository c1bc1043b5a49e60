"""Buffers of an optimizer's step: what it allocates beside parameters, gradients and state, and frees again.

    AdamW, one parameter after the other (CPU):     sqrt and quotient of one, and the quotient of the one before
    AdamW, all parameters in one call (CUDA):       one root of every parameter

torch takes the loop on CPUs and `foreach` on CUDA unless told otherwise. The counts below are copies of a parameter;
`tests/cost_models/test_optimizer_step.py` measures every class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


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
"""By class of torch.optim (torch 2.13). Classes outside of the table count as Adam."""


def step_buffer_bytes(optimizer: str, parameter_bytes: Sequence[float], device_kind: Literal["cuda", "cpu"]) -> float:
    """Most bytes of temporaries during one step.

    parameter_bytes: bytes of the trained parameters of one device, in the order in which the optimizer has them.
    """
    copies = TEMPORARIES.get(optimizer, TEMPORARIES["Adam"])
    if device_kind == "cuda":
        return copies.foreach * sum(parameter_bytes)
    previous = [0.0, *parameter_bytes]
    return max(
        (copies.own * own + copies.previous * before for own, before in zip(parameter_bytes, previous, strict=False)),
        default=0.0,
    )

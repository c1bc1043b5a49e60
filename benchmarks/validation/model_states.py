"""Model states: parameters, gradients and optimizer states of one device, as the ZeRO stages cut them.

    7.5e9 parameters, 16-bit with fp32 Adam, ZeRO-1 over 64 devices
    2 x 7.5e9 + 2 x 7.5e9 + 12 x 7.5e9 / 64 = 31.4 GB            (Rajbhandari et al. 2020, table 1)

With P parameters, p, g and k bytes per parameter, gradient and optimizer state, and d devices:

    stage 0: (p + g + k) P      1: (p + g + k/d) P      2: (p + (g + k)/d) P      3: (p + g + k) P / d

Megatron's distributed optimizer is stage 1 with fp32 gradients in one buffer: P (6 + 12/d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.errors import ConfigurationError

ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDtypes:
    """Bytes per parameter element of what training keeps."""

    parameter: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    """fp32 Adam with fp32 master weights: 4 + 4 + 4."""


MEGATRON = StateDtypes()
"""16-bit weights, fp32 main gradients, master weights and moments: 18 bytes
(megatron/training/theoretical_memory_usage.py)."""
ZERO_PAPER = StateDtypes(gradient=2.0)
"""16-bit weights and gradients, 12 bytes of Adam: 16 bytes (Rajbhandari et al. 2020, section 3.1)."""


def state_bytes(parameters: float, dtypes: StateDtypes, stage: ZeroStage, degree: int) -> float:
    """Bytes of parameters, gradients and optimizer states on one device; `degree` devices share what is cut.

    parameters: elements on this device before ZeRO cuts them. Raises ConfigurationError for a degree below 1.
    """
    if degree < 1:
        raise ConfigurationError(f"states are cut over {degree} devices: at least 1")
    cut = [stage >= 3, stage >= 2, stage >= 1]
    parts = [dtypes.parameter, dtypes.gradient, dtypes.optimizer]
    return parameters * sum(part / degree if is_cut else part for part, is_cut in zip(parts, cut, strict=True))

"""The factor of a capacity as it is asked and kept: ep="capacity", expert_capacity=1.25.

The one goes with the other: a factor drops rows, so what runs without one never does.
"""

from __future__ import annotations

from typing import Final

from autopar.errors import ConfigurationError

CAPPED: Final = "capacity"
"""The way, as `ep=` says it."""
MOST = 1 << 20
"""Of a factor: at the number of experts nothing is dropped any more."""


def check_expert_capacity(ep: object, factor: object) -> None:
    """Raise ConfigurationError for a factor that is no number above 0, for one of another way, and for the way without
    one."""
    if factor is None:
        if ep == CAPPED:
            raise ConfigurationError(
                f"ep={CAPPED!r} needs expert_capacity: how many times its even share of a rank's rows an expert takes, "
                "such as 1.25"
            )
        return
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= MOST:
        raise ConfigurationError(
            f"expert_capacity={factor!r}: write a number above 0 (and at most {MOST:,}), such as 1.25: an expert takes "
            "so many times its even share of a rank's rows"
        )
    if ep != CAPPED:
        raise ConfigurationError(
            f"expert_capacity={factor} drops rows, which ep={ep!r} does not: write ep={CAPPED!r}, or leave it out"
        )

"""Search mode: how long the planner may look, as `mode=` and `time_limit=` say it.

    mode="fast"          a few seconds per mesh
    time_limit=60.0      60 s for everything, whatever the mode says

What the modes allow stands in one table, `planner/problem/search_limits.py`.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from autopar.errors import ConfigurationError
from autopar.nearest_name import did_you_mean

Mode: TypeAlias = Literal["fast", "default", "max"]


def check_search(mode: str, time_limit: float | None) -> None:
    """Raise ConfigurationError for an unknown mode and for a limit that is no positive number of seconds."""
    known = get_args(Mode)
    if mode not in known:
        raise ConfigurationError(f"mode={mode!r}: write one of {', '.join(known)}{did_you_mean(mode, known)}")
    if time_limit is None:
        return
    number = isinstance(time_limit, int | float) and not isinstance(time_limit, bool)
    if not number or not math.isfinite(time_limit) or time_limit <= 0:
        raise ConfigurationError(f"time_limit={time_limit!r}: write seconds for the whole planning, for example 60.0")

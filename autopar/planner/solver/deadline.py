"""How long a solve may take: one deadline, made at the entry and handed down."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A point in time (`time.monotonic`), or None for no limit."""

    at: float | None

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        """Return the deadline `seconds` from now."""
        return Deadline(at=None if seconds is None else time.monotonic() + seconds)

    def left(self) -> float:
        """Return the seconds left, at least 0; infinite without a limit."""
        return math.inf if self.at is None else max(0.0, self.at - time.monotonic())

"""Renamed: documented names that have a new one, and until which version the old one works.

    renamed("module.gather", stacklevel=2)     DeprecationWarning: module.gather is called module.full since
                                               autopar 0.1; the old name works until autopar 0.3

The rule stands in docs/api.md: an old name stays for two minor versions, and says the new one whenever it is used.
`tests/test_renamed.py` fails in the version in which one has to go.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

VERSIONS_KEPT = 2
"""Minor versions for which an old name stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """old and new: as the docs write them; since: the version (major, minor) that has both."""

    old: str
    new: str
    since: tuple[int, int]

    @property
    def gone(self) -> tuple[int, int]:
        """The first version without the old name."""
        return self.since[0], self.since[1] + VERSIONS_KEPT

    def __str__(self) -> str:
        since, gone = (".".join(map(str, version)) for version in (self.since, self.gone))
        return f"{self.old} is called {self.new} since autopar {since}; the old name works until autopar {gone}"


RENAMED: tuple[Renamed, ...] = (Renamed(old="module.gather", new="module.full", since=(0, 1)),)


def renamed(old: str, *, stacklevel: int = 1) -> None:
    """Warn who uses the old name. stacklevel: of the caller, as `warnings.warn` counts."""
    found = next(each for each in RENAMED if each.old == old)
    warnings.warn(str(found), DeprecationWarning, stacklevel=stacklevel + 1)

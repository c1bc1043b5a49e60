"""Nearest name: what an error adds where a word is mistyped.

did_you_mean("dp_shrad", ("dp_shard", "tp"))      '; did you mean "dp_shard"?'
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LEAST_ALIKE = 0.6
"""Share of letters in common below which a word was not meant."""


def nearest_name(word: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like the word, whatever the case of letters; None where none does."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.strip().lower(), names, n=1, cutoff=LEAST_ALIKE)
    return names[found[0]] if found else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of an error message: `; did you mean "tp"?`, or "" where no known name looks like the word."""
    found = nearest_name(word, known) if isinstance(word, str) else None
    return "" if found is None else f'; did you mean "{found}"?'

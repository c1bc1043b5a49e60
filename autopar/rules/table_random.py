"""Rules of operators that draw: every dim may be split, since each element is drawn by its global index."""

from __future__ import annotations

from collections.abc import Mapping

RANDOM_RULES: Mapping[str, str] = {
    "autopar.dropout": "... -> ..., ...",
    "autopar.dropout_backward": "..., ... -> ...",
    "autopar.uniform": "-> ...",
    "autopar.normal": "-> ...",
    "autopar.exponential": "-> ...",
    "autopar.integers": "-> ...",
}

"""Precision names: what `precision=` and `--precision` may say. What they do to a graph: `capture/precision.py`."""

from __future__ import annotations

from autopar.errors import ConfigurationError
from autopar.nearest_name import did_you_mean

PRECISION_NAMES = ("fp32", "bf16")
NAMES_ELSEWHERE = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
"""torch's names, beside which ours are meant."""


def check_precision(precision: str | None) -> None:
    """Raise ConfigurationError for an unknown name, with the one that is meant."""
    if precision is None or precision in PRECISION_NAMES:
        return
    named = str(precision).removeprefix("torch.")
    near = did_you_mean(NAMES_ELSEWHERE.get(named, precision), PRECISION_NAMES)
    raise ConfigurationError(
        f'precision={precision!r} is unknown: write "bf16" (products in bf16, fp32 parameters, reductions and '
        f'loss) or "fp32" (the dtypes of the model){near}'
    )

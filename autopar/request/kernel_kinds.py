"""Which groups of operators run as kernels of ours, as asked: kinds of `plan_entries.KERNELS`."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ConfigurationError
from autopar.plans.plan_entries import KERNELS


def check_kernels(kernels: Sequence[str] | None) -> None:
    """Raises ConfigurationError for a kind that is none."""
    for kind in kernels or ():
        if kind not in KERNELS:
            raise ConfigurationError(f"kernels= names {kind!r}; write some of {', '.join(KERNELS)}, or none: ()")
    if kernels and "linear_cross_entropy" in kernels and "cross_entropy" not in kernels:
        raise ConfigurationError("kernels= names linear_cross_entropy, which joins a cross_entropy: write both")

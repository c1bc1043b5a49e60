"""Lossy: to how few bits what forward saves may be rounded, as asked by `lossy=`.

    none     to none: what loses nothing (recomputation, masks, the host) is chosen alone
    8bit     8 bits a value, by chance, so that the mean is exact
    4bit     4, too, where gradients keep an exact mean
    2bit     2, too

What is asked for is chosen where it makes room that memory lacks.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from autopar.errors import ConfigurationError
from autopar.nearest_name import did_you_mean
from autopar.plans.logical_shards import Deterministic, num_shards

Lossy: TypeAlias = Literal["none", "8bit", "4bit", "2bit"]
LOSSY: tuple[Lossy, ...] = get_args(Lossy)


def check_lossy(asked: str | None, deterministic: Deterministic, has_stages: bool) -> None:
    """Raise ConfigurationError for what there is not, beside equal bits on any number of devices, since what memory
    asks to be rounded depends on it, and beside stages, which are planned without."""
    if asked is None:
        return
    if asked not in LOSSY:
        raise ConfigurationError(f"lossy={asked!r}: write one of {', '.join(LOSSY)}{did_you_mean(asked, LOSSY)}")
    if asked == "none":
        return
    if num_shards(deterministic):
        raise ConfigurationError(
            f"lossy={asked!r}: what is rounded depends on the memory of a device, and deterministic={deterministic} "
            "asks for equal bits on any number of them; leave one of them out"
        )
    if has_stages:
        raise ConfigurationError(f"lossy={asked!r}: stages save values as they are; leave out pp= or lossy=")

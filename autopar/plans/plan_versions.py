"""Versions of the plan file: what has to change in an older file before today's fields can be read.

    current({"schema_version": 1, ...}, "plan.json")      the document of today, without "schema_version"

A change of the file that only adds a field with a default needs no version. A new one is due where the same text would
mean something else; what then makes an older file say the same as before stands in `CONVERSIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import ConfigurationError

SCHEMA_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A field of older files, the JSON value that says today what was meant then, and why. where_absent: of a file that
    leaves the field out; always: of any file, as what it says there means something else now."""

    field: str
    why: str
    where_absent: object = None
    always: object = None


CONVERSIONS: Mapping[int, tuple[Conversion, ...]] = {
    1: (
        Conversion(
            field="bucket_bytes",
            where_absent=None,
            why="version 1 was priced and run with every collective awaited where it starts; an absent field now means "
            "that collectives start early, which takes more memory",
        ),
    ),
    2: (
        Conversion(
            field="kernels",
            always=[],
            why="the kernels that version 2 names were put in when the program was lowered, its operators are those of "
            "a program without them; now they are in the program that is planned, so the backend's kernels run",
        ),
    ),
}
"""Version -> what makes a file of it one of the next version."""


def current(document: Mapping[str, object], origin: str) -> dict[str, object]:
    """The fields of a plan file as this version names them. Raises ConfigurationError for an unknown version."""
    converted = dict(document)
    version = converted.pop("schema_version", None)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ConfigurationError(
            f'{origin} has schema version {version}: a plan file begins with "schema_version": {SCHEMA_VERSION}; '
            "`autopar plan MODEL -o FILE` or `plan.save(FILE)` writes one"
        )
    if version > SCHEMA_VERSION:
        raise ConfigurationError(
            f"{origin} has schema version {version}, this autopar reads 1 to {SCHEMA_VERSION}: it comes from a newer "
            "autopar; install that one (pip install --upgrade autopar), or plan again with this one"
        )
    for older in range(version, SCHEMA_VERSION):
        for conversion in CONVERSIONS[older]:
            if conversion.always is not None:
                converted[conversion.field] = conversion.always
            converted.setdefault(conversion.field, conversion.where_absent)
    return converted

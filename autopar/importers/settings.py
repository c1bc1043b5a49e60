"""Settings of another tool's configuration, taken out one by one, so that what nobody read is known at the end.

    settings = Settings({"tp": 4, "ep": 2}, "job.toml [parallelism]")
    settings.count("tp")                                     # 4
    settings.refuse_above_one({"ep": "expert parallelism"})   # ConfigurationError: it is 2
    settings.unread                                          # [] : both were looked at

A setting that changes how a model is split, and that a plan cannot be told, is refused by its name: a baseline that
leaves it out would be another one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from autopar.errors import ConfigurationError

Value = TypeVar("Value")
MOST = 1 << 40
"""Of any count: degrees, samples, tokens."""
OFF = (None, False, 0, "", "none", "None", "null", "False", "false")


class Settings:
    """Names and values as the tool reads them, and where they stand. Errors name both."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigurationError(f"{where} must be a table of settings, not {reprlib.repr(values)}")
        self._values: Mapping[str, Any] = values
        self._read: set[str] = set()
        self.where = where

    def get(self, name: str, default: Any = None) -> Any:
        """A value as it stands, `default` where there is none."""
        self._read.add(name)
        return self._values.get(name, default)

    def count(self, name: str, default: int = 1, *, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`."""
        value = self.get(name, default)
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = least - 1
        if isinstance(value, bool | float) or not least <= number <= most:
            raise ConfigurationError(
                f"{self.where}: {name} is {reprlib.repr(value)}; it must be a whole number of at least {least}, and at "
                f"most {most:,}"
            )
        return number

    def optional_count(self, name: str) -> int | None:
        """A whole number of at least one, None where the tool is left to find it ("auto")."""
        return None if self.get(name) in (None, "auto") else self.count(name)

    def open_count(self, name: str, default: int = -1) -> int:
        """A whole number of at least one, -1 where it takes what is left."""
        return -1 if self.get(name, default) in (None, -1) else self.count(name, default)

    def one_of(self, name: str, choices: Mapping[str, Value], default: str) -> Value:
        """What a word means. Raises ConfigurationError for a word that has no meaning in a plan."""
        word = str(self.get(name, default))
        if word not in choices:
            raise ConfigurationError(
                f"{self.where}: {name} is {reprlib.repr(word)}, which a plan cannot say; it can {sorted(choices)}"
            )
        return choices[word]

    def refuse_above_one(self, degrees: Mapping[str, str]) -> None:
        """Degrees that a plan has no axis for must be one. degrees: name -> what it is."""
        for name, meaning in degrees.items():
            if (size := self.count(name)) > 1:
                raise ConfigurationError(
                    f"{self.where}: {name} is {size}; {meaning} is no axis that a plan can be asked for. Set it to 1, "
                    "or plan without dims: the search splits experts where that is cheaper"
                )

    def refuse_where_on(self, switches: Iterable[str], why: str) -> None:
        """Switches that change the split, the memory or the numbers, and that a plan cannot be told."""
        for name in switches:
            value = self.get(name)
            if value not in OFF and not (isinstance(value, Mapping) and value.get("device") in OFF):
                raise ConfigurationError(f"{self.where}: {name} is {reprlib.repr(value)}; {why}: switch it off")

    @property
    def unread(self) -> list[str]:
        """Names that stand here and that nobody asked for."""
        return [name for name in self._values if name not in self._read]

"""Loads as asked: expert_load="zipf" | "zipf:1.2" | "run.jsonl" | {"layers.*.experts": counts}.

Without a word every expert gets as many rows. "zipf:s" gives the i-th expert a share of 1 / i^s, the worst order for
experts that lie in blocks. A log of `StepLog` holds the rows of every expert, per module, where rows travelled; counts
are any numbers in proportion.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from autopar.errors import ConfigurationError
from autopar.nearest_name import did_you_mean

ExpertLoad: TypeAlias = str | Mapping[str, Sequence[float]]
ZIPF = "zipf"
LOG, EXPERT_ROWS = ".jsonl", "expert_rows"
"""How a file of `StepLog` ends, and the key of its lines that counts rows."""


def check_expert_load(load: object) -> None:
    """Raise ConfigurationError for what is no load."""
    if load is None:
        return
    if isinstance(load, str):
        _logged(load) if load.endswith(LOG) else _exponent(load)
        return
    if not isinstance(load, Mapping):
        raise ConfigurationError(f"expert_load={load!r}: write zipf, zipf:1.2, a log of steps, or counts per module")
    for name, counts in load.items():
        numbers = list(counts) if isinstance(counts, Sequence) and not isinstance(counts, str) else []
        right = all(isinstance(one, int | float) and math.isfinite(one) and one >= 0 for one in numbers)
        if not numbers or not right or not sum(numbers) > 0:
            raise ConfigurationError(
                f"expert_load[{name!r}] is {counts!r}: write how many rows each expert gets: numbers of at least 0, "
                "not all 0"
            )


def said_load(load: ExpertLoad) -> str | dict[str, list[float]]:
    """A load by its numbers, as JSON values: a log may say others tomorrow."""
    if isinstance(load, str):
        return _logged(load) if load.endswith(LOG) else load
    return {name: [float(count) for count in counts] for name, counts in load.items()}


def load_shares(load: ExpertLoad | None, modules: Mapping[str, int]) -> dict[str, tuple[float, ...]]:
    """Module -> the part of its rows that each of its experts gets, of those of which something is said.

    modules: with products of experts, and the number of these. Raises ConfigurationError for patterns that no module
    has, and for other numbers of experts.
    """
    if load is None:
        return {}
    if isinstance(load, str) and load.endswith(LOG):
        return load_shares(_logged(load), modules)
    if isinstance(load, str):
        exponent = _exponent(load)
        return {name: _parts([1.0 / (i + 1) ** exponent for i in range(n)]) for name, n in modules.items()}
    found: dict[str, tuple[float, ...]] = {}
    for pattern, counts in load.items():
        for name in modules_called(pattern, modules, "expert_load"):
            if len(counts) != modules[name]:
                raise ConfigurationError(
                    f"expert_load[{pattern!r}] has {len(counts)} numbers, {name} has {modules[name]} experts"
                )
            found[name] = _parts(counts)
    return found


def modules_called(pattern: str, modules: Collection[str], argument: str) -> list[str]:
    """The modules with products of experts that a pattern of an argument names. Raises ConfigurationError for none."""
    named = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
    if not named:
        known = ", ".join(modules) or "none: the model has no products of experts"
        raise ConfigurationError(
            f"{argument}: no module with experts is called {pattern!r}{did_you_mean(pattern, tuple(modules))}; "
            f"there are {known}"
        )
    return named


def _logged(path: str) -> dict[str, list[float]]:
    """Module -> rows of every expert, of all steps of a log."""
    found: dict[str, list[float]] = {}
    try:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        for module, rows in (item for line in lines for item in line.get(EXPERT_ROWS, {}).items()):
            found[module] = [float(a + b) for a, b in zip(found.get(module, [0.0] * len(rows)), rows, strict=True)]
    except OSError as error:
        raise ConfigurationError(f"cannot read expert_load={path}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"expert_load={path} is no log of steps: {error}") from error
    if not found:
        raise ConfigurationError(
            f"expert_load={path} counts no rows of experts: StepLog does where they travel (dims={{'ep': 4}})"
        )
    return found


def _exponent(load: str) -> float:
    kind, colon, text = load.partition(":")
    try:
        exponent = float(text) if colon else 1.0
    except ValueError:
        exponent = math.nan
    if kind != ZIPF or not 0 <= exponent < 100:
        raise ConfigurationError(
            f"expert_load={load!r}: write zipf or zipf:1.2 (an exponent from 0 on), a log of steps, or counts"
        )
    return exponent


def _parts(counts: Sequence[float]) -> tuple[float, ...]:
    total: Any = math.fsum(counts)
    return tuple(float(count) / total for count in counts)

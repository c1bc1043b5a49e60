"""What holds for all tests: plans are priced by presets, not by what somebody measured on this machine before.

What is imported by then stays to the end: the garbage collector need not look through it again and again. Seeds set
torch's generator of the CPU alone where there is no accelerator: torch writes pytest's whole stack down at each, once
per kind of device, for an error on a device that never comes.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from autopar import api
from autopar.cli import simulate_command
from autopar.explain import what_if
from tests.distributed.captured_once import SharedCaptures

_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """An empty folder for profiles, and checks of all that is lowered, for this process and those that it starts."""
    folder = tempfile.TemporaryDirectory(prefix="autopar-tests-")
    config.stash[_FOLDER] = folder
    os.environ["AUTOPAR_CACHE"] = folder.name
    os.environ.setdefault("AUTOPAR_CHECK", "1")
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(gc.unfreeze)
    if not torch.accelerator.is_available():
        torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture
def shared_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For files whose tests ask of the same models again and again: each is captured once. Models are told apart by
    their types, plain attributes, configurations and tensors."""
    for module in (api, simulate_command, what_if):
        monkeypatch.setattr(module, "Captures", SharedCaptures)


def in_sample(row: str, number: int, sample: str | Sequence[str] = (), every: int = 0) -> bool:
    """Whether `make test` runs this row of an exhaustive test: its name holds a part that the sample names, or it is
    one of every so many."""
    parts = [sample] if isinstance(sample, str) else sample
    return any(part in row for part in parts) or (every > 0 and number % every == 0)


def keep_samples(items: Sequence[pytest.Item], whole: bool) -> None:
    """Exhaustive tests run in `make exhaustive`, but for their samples. With `whole`, all rows were collected, and a
    sample without a row is an error."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("exhaustive"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, rows in tests.items():
        mark = rows[0].get_closest_marker("exhaustive")
        assert mark is not None
        sample = [row for i, row in enumerate(rows) if in_sample(row.nodeid.partition("[")[2], i, **mark.kwargs)]
        if mark.kwargs and whole and not 0 < len(sample) < len(rows):
            raise pytest.UsageError(f"{test}: {len(sample)} of {len(rows)} rows are in its sample {mark.kwargs}")
        for row in sample:
            row.own_markers.remove(mark)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with many slow tests begin first, so that no processor waits for one of them in the end; those that run
    four processes themselves come last."""
    keep_samples(items, whole=not any("[" in argument for argument in config.args))
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    last = {item.path for item in items if item.get_closest_marker("distributed")}
    items.sort(key=lambda item: (item.path in last, -slow[item.path]))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()

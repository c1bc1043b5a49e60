"""What holds for all tests: plans are priced by presets, not by what somebody measured on this machine before.

What is imported by then stays to the end: the garbage collector need not look through it again and again.
"""

from __future__ import annotations

import gc
import os
import tempfile

import pytest

_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """An empty folder for profiles, and checks of all that is lowered, for this process and those that it starts."""
    folder = tempfile.TemporaryDirectory(prefix="autopar-tests-")
    config.stash[_FOLDER] = folder
    os.environ["AUTOPAR_CACHE"] = folder.name
    os.environ.setdefault("AUTOPAR_CHECK", "1")
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(gc.unfreeze)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()

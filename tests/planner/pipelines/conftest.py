"""Pipelines of a few small models are planned again and again: each is captured once per number of micro-batches."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _of_pipelines(shared_captures: None) -> None:
    """See `shared_captures`."""

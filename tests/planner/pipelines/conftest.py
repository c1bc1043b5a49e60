"""Pipelines of a few small models are planned again and again: each is captured once per number of micro-batches."""

from __future__ import annotations

import pytest

from autopar import api
from tests.distributed.captured_once import SharedCaptures


@pytest.fixture(autouse=True)
def _shared_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "Captures", SharedCaptures)

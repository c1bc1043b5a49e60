"""Fixtures of the tests that run on several processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.workers import WORKERS
from tests.distributed.pool import Pool, forked


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The one pool of gloo workers of this session; its processes start with the first job."""
    workers = forked(WORKERS)
    yield workers
    workers.close()

"""Allocator: what c10's caching allocator counts for a request."""

import pytest

from autopar.cost_models.allocator import rounded_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("request_bytes", "rounded"),
    [
        (0, 0),
        (1, 512),
        (512, 512),
        (513, 1024),
        (1 * MIB + 1, 1 * MIB + 512),
        (37 * MIB + 100 * KIB, 37 * MIB + 100 * KIB),
        (1 << 30, 1 << 30),
    ],
)
def test_a_request_counts_whole_blocks(request_bytes: int, rounded: int) -> None:
    assert rounded_bytes(request_bytes) == rounded

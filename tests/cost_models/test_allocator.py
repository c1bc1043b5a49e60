"""Allocator: the sizes of c10's caching allocator, request by request."""

import pytest

from autopar.cost_models.allocator import least_reserved_bytes, rounded_bytes, segment_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("request_bytes", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (37 * MIB + 100 * KIB, 37 * MIB + 100 * KIB, 38 * MIB),
        (1 << 30, 1 << 30, 1 << 30),
    ],
)
def test_a_request_is_rounded_and_served_from_a_segment(request_bytes: int, rounded: int, segment: int) -> None:
    assert rounded_bytes(request_bytes) == rounded
    assert segment_bytes(request_bytes) == segment


def test_blocks_of_one_pool_share_segments_and_large_ones_do_not() -> None:
    assert least_reserved_bytes([]) == 0
    assert least_reserved_bytes([512] * 4096) == 2 * MIB
    assert least_reserved_bytes([512] * 4097) == 4 * MIB
    assert least_reserved_bytes([5 * MIB] * 4) == 20 * MIB
    assert least_reserved_bytes([11 * MIB, 11 * MIB, 600]) == 26 * MIB

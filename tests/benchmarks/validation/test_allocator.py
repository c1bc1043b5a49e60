"""Allocator: what c10's caching allocator counts for a request."""

import pytest

from benchmarks.validation.allocator import LargeBlocks, rounded_bytes

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


def test_blocks_share_a_segment_and_count_what_cannot_be_split_off() -> None:
    blocks = LargeBlocks()
    assert [blocks.take(size * MIB) / MIB for size in (9, 9, 1.5)] == [9, 9, 2]
    assert blocks.take(1.5 * MIB) == 1.5 * MIB  # a new segment of 20 MiB
    assert blocks.take(100) == 512


def test_large_requests_have_segments_of_whole_two_mebibytes() -> None:
    blocks = LargeBlocks()
    assert [blocks.take(size * MIB) / MIB for size in (10, 11, 11.5, 12.75)] == [10, 12, 12, 12.75]


def test_emptied_segments_are_taken_before_new_ones_by_the_best_fit() -> None:
    blocks = LargeBlocks()
    blocks.give_back([30 * MIB, 12 * MIB, 3 * MIB, 0.5 * MIB])
    assert blocks.take(9 * MIB) == 9 * MIB  # of the 12
    assert blocks.take(2.5 * MIB) == 3 * MIB  # what is left of it
    assert blocks.take(2.5 * MIB) == 2.5 * MIB  # of the 30

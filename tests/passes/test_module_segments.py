from __future__ import annotations

import pytest

from autopar.errors import ConfigurationError
from autopar.passes.module_segments import placed, segment_of


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("layers.3.mlp/gelu#0", "layers.3"),
        ("layers.3/add#0/bwd", "layers.3"),
        ("layers.3.norm.weight", "layers.3"),
        ("decoder.blocks.0/add#0", "decoder.blocks.0"),
        ("head.norm/mul#0", "head"),
        ("head/sum#0", "head"),
    ],
)
def test_a_segment_is_the_block_or_the_outermost_module(name: str, segment: str) -> None:
    assert segment_of(name) == segment


def test_chunks_are_equal_runs_with_the_embedding_first_and_the_head_last() -> None:
    assert placed(["b"] * 4, 2, first="e", last="h") == (("e", "b", "b"), ("b", "b", "h"))


def test_what_does_not_divide_goes_to_the_first_chunks() -> None:
    assert [len(chunk) for chunk in placed(["b"] * 5, 2, first="e", last="h")] == [4, 3]


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 layers do not fill 3"):
        placed(["b"] * 2, 3, first="e", last="h")


@pytest.mark.parametrize(
    ("layers", "chunks"),
    [
        (["b", "c"], (("e", "b"), ("c", "h"))),
        ([], (("e", "h"),)),
    ],
)
def test_as_many_chunks_as_layers_are_the_most(layers: list[str], chunks: tuple[tuple[str, ...], ...]) -> None:
    assert placed(layers, len(chunks), first="e", last="h") == chunks

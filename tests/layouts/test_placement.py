"""What is written of a placement is read back as it was."""

from __future__ import annotations

import pytest

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Partial, Replicate, Shard, format_layout, parse_layout, parse_placement


def test_a_layout_is_read_back_as_it_was_written() -> None:
    layout = (Shard(0), Shard(1, 3), Replicate(), Partial("max"))
    assert format_layout(layout) == ["S(0)", "S(1, split=3)", "R", "P(max)"]
    assert parse_layout(format_layout(layout)) == layout


def test_text_that_is_no_placement_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'S\(a\)' is no placement"):
        parse_placement("S(a)")

"""Constraints: what is accepted, and errors that say what to write."""

import pytest

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Replicate, Shard
from autopar.request.constraints import EVERY_AXIS, parse_constraints


def test_constraints_name_patterns_and_axes() -> None:
    asked = {"*.weight": {"tp": "S(0)"}, "head": Replicate(), "layers.0": {"recompute": "full"}, "bias": "S(-1)"}
    constraints = parse_constraints(asked)
    assert constraints.placements == {
        "*.weight": {"tp": Shard(0)},
        "head": {EVERY_AXIS: Replicate()},
        "bias": {EVERY_AXIS: Shard(-1)},
    }
    assert constraints.recompute == {"layers.0": "full"}


def test_an_unknown_constraint_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no_replicated_compute"):
        parse_constraints("fast")

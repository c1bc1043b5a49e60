"""The verdict of the ranks stands in for what a transport raised, and for nothing else."""

from __future__ import annotations

import pytest

from autopar.errors import RankLostError
from autopar.runtime.collectives.progress import RankProgress


def fails(here: RankProgress, error: Exception) -> None:
    """A call in which there is a verdict, and which raises this."""
    with here.inside("call", 1):
        here.verdict = RankLostError("rank 3 is silent")
        raise error


def test_a_verdict_does_not_hide_an_error_of_the_program() -> None:
    here = RankProgress()
    with pytest.raises(KeyError, match="mine"):
        fails(here, KeyError("mine"))
    assert here.place().failed == (1, "KeyError: 'mine'")


def test_a_verdict_is_raised_for_what_a_transport_is_the_cause_of() -> None:
    here = RankProgress()
    error = ValueError("no step")
    error.__cause__ = RuntimeError("Connection closed by peer [127.0.0.1]:4711")
    with pytest.raises(RankLostError, match="rank 3 is silent"):
        fails(here, error)

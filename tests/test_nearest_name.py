"""The word that a mistyped one stands for."""

from __future__ import annotations

from autopar.nearest_name import did_you_mean, nearest_name

AXES = ("dp_replicate", "dp_shard", "tp", "pp")


def test_the_nearest_name_is_found_whatever_its_case() -> None:
    assert nearest_name("dp_shrad", AXES) == "dp_shard"
    assert nearest_name(" DP_SHARD", AXES) == "dp_shard"
    assert nearest_name("h100", ("H100",)) == "H100"


def test_words_that_are_like_none_are_not_guessed() -> None:
    assert nearest_name("tensor", AXES) is None
    assert (did_you_mean("tensor", AXES), did_you_mean(3, AXES)) == ("", "")
    assert did_you_mean("tpp", AXES) == '; did you mean "tp"?'

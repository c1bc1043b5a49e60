"""Replicated experts as asked: what is read, and what is refused."""

from __future__ import annotations

import pytest

from autopar.errors import ConfigurationError
from autopar.request.replicated_experts import ReplicatedExperts, check_replicated, replicated_of_modules

MODULES = {"layers.0.experts": 4, "layers.1.experts": 4, "head.experts": 2}
LOAD = {"layers.0.experts": (0.1, 0.4, 0.2, 0.3), "head.experts": (0.1, 0.9)}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, {}),
        (0, {}),
        (1, {"layers.0.experts": (1,), "head.experts": (1,)}),
        (3, {"layers.0.experts": (1, 2, 3), "head.experts": (0, 1)}),
        ({"layers.*": [3, 0]}, {"layers.0.experts": (0, 3), "layers.1.experts": (0, 3)}),
        ({"head.experts": []}, {}),
    ],
)
def test_experts_of_modules(asked: ReplicatedExperts | None, found: dict[str, tuple[int, ...]]) -> None:
    check_replicated(asked, "dispatch", has_load=True, has_axis=True)
    assert replicated_of_modules(asked, LOAD, MODULES) == found


@pytest.mark.parametrize(
    ("asked", "ep", "words"),
    [
        (1, "gather", "replicated where rows travel"),
        (-1, None, "a number from 0 on"),
        (True, None, "a number from 0 on"),
        ("2", None, "a number from 0 on"),
        ({"a": [0, 0]}, None, r"\['a'\] is \[0, 0\]: write experts"),
        ({"a": [-1]}, None, "counted from 0"),
        ({"a": "1"}, None, "counted from 0"),
        ({"a": 1}, None, "counted from 0"),
    ],
)
def test_what_cannot_be_meant_says_why(asked: object, ep: str | None, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_replicated(asked, ep, has_load=True, has_axis=True)


def test_numbers_need_a_load_and_copies_an_axis() -> None:
    check_replicated(0, None, has_load=False, has_axis=True)
    with pytest.raises(ConfigurationError, match="say expert_load="):
        check_replicated(1, None, has_load=False, has_axis=True)
    with pytest.raises(ConfigurationError, match="dims="):
        check_replicated(1, None, has_load=True, has_axis=False)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"layers.0.expert": [1]}, "no module with experts is called .*did you mean.*layers.0.experts"),
        ({"head.*": [2]}, "head.experts has experts 0 to 1"),
    ],
)
def test_experts_of_other_models_are_refused(asked: ReplicatedExperts, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        replicated_of_modules(asked, LOAD, MODULES)

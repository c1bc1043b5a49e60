"""Loads as asked: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.errors import ConfigurationError
from autopar.request.expert_load import ExpertLoad, check_expert_load, load_shares, said_load

MODULES = {"layers.0.experts": 4, "layers.1.experts": 4, "head.experts": 2}


@pytest.mark.parametrize(
    ("load", "found"),
    [
        (None, {}),
        ("zipf:0", {name: (1 / n,) * n for name, n in MODULES.items()}),
        ({"layers.*.experts": [6, 0, 1, 1]}, dict.fromkeys(list(MODULES)[:2], (0.75, 0.0, 0.125, 0.125))),
    ],
)
def test_shares_of_modules(load: ExpertLoad | None, found: dict[str, tuple[float, ...]]) -> None:
    check_expert_load(load)
    assert load_shares(load, MODULES) == found


def test_zipf_gives_the_first_expert_most() -> None:
    shares = load_shares("zipf", MODULES)["layers.0.experts"]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25])


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ("zip", "write zipf or zipf:1.2"),
        ("zipf:x", "an exponent"),
        ("zipf:-1", "from 0 on"),
        (3, "counts per module"),
        ("nowhere.jsonl", "cannot read expert_load=nowhere.jsonl: No such file"),
        ({"a": [1, -1]}, r"expert_load\['a'\] is \[1, -1\]: .* at least 0"),
        ({"a": [0, 0]}, "not all 0"),
        ({"a": "12"}, "how many rows each expert gets"),
        ({"a": [1.0, float("inf")]}, "at least 0"),
    ],
)
def test_what_is_no_load_says_why(load: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_expert_load(load)


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({"layers.0.expert": [1, 1, 1, 1]}, "no module with experts is called .*did you mean.*layers.0.experts"),
        ({"head.*": [1, 1, 1]}, "has 3 numbers, head.experts has 2 experts"),
    ],
)
def test_loads_of_other_models_are_refused(load: ExpertLoad, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_shares(load, MODULES)


def test_a_log_of_steps_is_a_load(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps({"step": i, "expert_rows": {"head.experts": [i, 2]}}) + "\n" for i in range(3)))
    assert load_shares(str(log), MODULES) == {"head.experts": (3 / 9, 6 / 9)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"step": 0}', "counts no rows of experts: StepLog does where they travel"),
        ("[1]", "is no log of steps"),
        ("{", "is no log of steps"),
        ('{"expert_rows": {"head.experts": ["a"]}}', "is no log of steps"),
    ],
)
def test_a_file_without_loads_says_why(text: str, words: str, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        check_expert_load(str(log))


def test_a_question_holds_the_numbers_of_a_log(tmp_path: Path) -> None:
    """Plans are kept under their question, and the same file may say something else later."""
    log = tmp_path / "run.jsonl"
    said = []
    for rows in ([3, 1], [1, 3]):
        log.write_text(json.dumps({"expert_rows": {"head.experts": rows}}))
        said.append(said_load(str(log)))
    assert said == [{"head.experts": [3.0, 1.0]}, {"head.experts": [1.0, 3.0]}]
    assert said_load("zipf:2") == "zipf:2"
    assert said_load({"head.experts": (2, 1)}) == {"head.experts": [2.0, 1.0]}

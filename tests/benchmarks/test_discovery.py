"""Operators of the table are found again without it; what only seems to hold is not found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autopar.rules import learning
from benchmarks import discovery
from benchmarks.discovery import FoundRule, found_rule, found_rules, main, operator_cases, summary
from tests.rules.operator_cases import Case

SAMPLED = (
    "aten.mm.default",
    "aten.bmm.default",
    "aten.mul.Tensor",
    "aten.where.self",
    "aten.sum.dim_IntList",
    "aten.amax.default",
    "aten.max.dim",
    "aten.sort.default",
    "aten.cat.default",
    "aten.tril.default",
    "aten.scatter_reduce.two",
    "aten.grid_sampler_2d.default",
    "autopar.attention.default",
    "autopar.recurrent_layer.default",
)
"""Of every kind of the table: products, elementwise, reductions, along a dim, positions, images, ours."""
LESS = {
    "aten.convolution.default": "by split_convolution",
    "aten.native_layer_norm.default": "by split_norm",
    "aten._softmax.default": "by split_softmax",
    "aten.flip.default": "by moved_rows",
}
"""Operator -> what all that is missing needs."""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))


def case_of(operator: str) -> Case:
    return next(case for case in operator_cases() if str(case.target) == operator)


@pytest.mark.parametrize("operator", SAMPLED)
def test_an_operator_is_found_again(operator: str) -> None:
    row = found_rule(case_of(operator))
    assert row.verdict in ("found again", "found more"), row


@pytest.mark.parametrize(("operator", "needed"), LESS.items())
def test_what_needs_an_implementation_of_ours_is_all_that_is_missing(operator: str, needed: str) -> None:
    row = found_rule(case_of(operator))
    assert row.verdict == "found less"
    assert all(needed in missing for missing in row.missing), row


def test_what_the_table_does_not_split_does_not_count() -> None:
    row = found_rule(case_of("aten.eye.default"))
    assert row.verdict == "nothing to find"
    assert summary([row])["whole"] == 0


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        ("aten.as_strided_scatter.default", "S(0), R -> S(0)"),
        ("aten.index_fill.int_Scalar", "R, S(0) -> P(min)"),
        ("aten._cdist_backward.default", "P(sum), P(sum), P(sum), P(sum) -> P(sum)"),
        ("aten._weight_norm_interface_backward.default", "P(sum), P(sum), P(sum), P(sum) -> P(sum), P(sum)"),
    ],
)
def test_what_held_by_accident_once_is_not_found(operator: str, wrong: str) -> None:
    assert wrong not in found_rule(case_of(operator)).extra


def test_what_a_found_rule_lacks_and_adds_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "rule_by_execution", lambda call: ("a _, _ _ -> a _ ; linear: x x", ""))
    row = found_rule(case_of("aten.mm.default"))
    assert row.verdict == "found less"
    assert row.missing == ("S(1), S(0) -> P(sum)", "R, S(1) -> S(1)")
    assert row.extra == ("P(sum), P(sum) -> P(sum)",)
    monkeypatch.setattr(discovery, "rule_by_execution", lambda call: (None, "no split holds"))
    refused = found_rule(case_of("aten.mm.default"))
    assert (refused.verdict, refused.reason) == ("refused", "no split holds")
    assert summary([row, refused])["whole"] == 0


def test_the_document_has_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["--only", "aten.neg.default", "--json", str(tmp_path / "rows.json")])
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["summary"]["whole"] == 1
    (row,) = written["rows"]
    assert FoundRule(**{**row, "missing": (), "extra": ()}).found == "a b -> a b ; linear: x"
    assert {"date", "machine"} <= written["measured"].keys()
    assert {"commit", "command"} <= written.keys()


def test_fewer_than_wanted_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "operator_cases", lambda: [case_of("aten.neg.default")])
    with pytest.raises(SystemExit):
        main([])


def test_nothing_comes_from_the_cache_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = found_rules([case_of("aten.neg.default")])
    monkeypatch.setattr(learning, "search_rule", None)
    with pytest.raises(TypeError):
        list(found_rules([case_of("aten.neg.default")]))
    assert dataclasses.replace(row, seconds=0.0).found == "a b -> a b ; linear: x"

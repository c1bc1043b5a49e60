"""The runner of the zoo: sound models agree, a planted fault is named, and no row stops the next one."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.agreement import Agreement
from benchmarks.zoo.registry import CI_ROWS, MODULES, THIRD_PARTY, entries, installed, packages_of
from benchmarks.zoo.row import APART, NO_REPLICATION, STEP_TIME, Answer, Row, summarise
from benchmarks.zoo.runner import append_row, read_rows, run_rows
from tests.distributed.zoo_entries import ENTRIES

MODULE = "tests.distributed.zoo_entries"
HANGING = "hangs"
SECONDS_TO_HANG, SECONDS_TO_END = 4.0, 45.0
"""A row's processes have started when its seconds begin: the hanging one waits them out, no other row takes so long."""


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """All planted rows, a sound one last too."""
    sound, *broken = ENTRIES
    found = run_rows([entry for entry in broken if entry.name == HANGING], (MODULE,), seconds=SECONDS_TO_HANG)
    others = [entry for entry in broken if entry.name != HANGING]
    found += run_rows([*others, sound], (MODULE,), seconds=SECONDS_TO_END)
    return {row.name: row for row in found}


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_a_sound_row_agrees_after_all_the_broken_ones(rows: dict[str, Row]) -> None:
    row = rows["sound"]
    assert row.status == "agrees", row.reasons
    assert set(row.answers) == {STEP_TIME, APART, NO_REPLICATION}
    assert row.answers[APART].sharded_share is not None
    assert row.answers[APART].sharded_share > 0.5


@pytest.mark.distributed
def test_a_result_that_is_wrong_disagrees(rows: dict[str, Row]) -> None:
    assert rows["wrong"].status == "disagrees"
    assert "loss error 1.0e-03" in rows["wrong"].reasons
    assert rows["wrong"].precision == "fp64", "asked again, as fp32 disagreed"
    assert "loss error 1.0e-03" in rows["wrong"].in_fp32


@pytest.mark.distributed
def test_what_stops_a_row_is_named(rows: dict[str, Row]) -> None:
    assert rows["raises"].status == "crashed"
    assert "planted: no such model" in rows["raises"].reasons
    assert rows["dies"].status == "crashed"
    assert "'build'" in rows["dies"].reasons
    assert rows["hangs"].status == "timed out"
    assert "'build'" in rows["hangs"].reasons
    assert rows["depends on data"].status == "not captured"
    assert "CaptureError" in rows["depends on data"].reasons


def test_the_summary_counts_captured_and_agreeing_rows() -> None:
    stopped = Row(name="a", family="plain", captured=True, stopped="timed out: 25 s")
    answered = Row(name="b", family="plain", captured=True, answers={NO_REPLICATION: Answer(replicated_share=0.04)})
    missing = Row(name="c", family="plain", error="CaptureError: no")
    found = summarise([stopped, answered, missing])
    assert found["captured_share"] == 2 / 3
    assert found["agree_of_captured_share"] == 0.0
    assert found["below_5_percent_replicated_share"] == 1.0
    assert found["status"] == {"failed": ["b"], "not captured": ["c"], "timed out": ["a"]}


def test_a_row_that_proves_nothing_does_not_agree() -> None:
    within, beyond = (Agreement(0.0, "weight", 0.9, 4.3, verdict) for verdict in ("no evidence", "disagrees"))
    agrees = Agreement(0.0, "weight", 1e-6, 1e-5, "agrees")
    found = {
        verdict: Row(
            name=verdict,
            family="plain",
            captured=True,
            precision=precision,
            answers={STEP_TIME: Answer(mesh="tp=4", agreement=one), APART: Answer(mesh="tp=4", agreement=other)},
        )
        for verdict, precision, one, other in [
            ("agrees", "fp64", agrees, agrees),
            ("no evidence", "fp32", agrees, within),
            ("disagrees", "fp32", within, beyond),
        ]
    }
    assert {verdict: row.status for verdict, row in found.items()} == {verdict: verdict for verdict in found}
    assert "9.0e-01 of 4e+00" in found["no evidence"].reasons
    summary = summarise(list(found.values()))
    assert summary["agree_of_captured_share"] == 1 / 3
    assert summary["compared_in_fp64"] == ["agrees"]
    assert summary["status"]["no evidence"] == ["no evidence"]


def test_rows_are_read_back_up_to_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = Row(name="a", family="plain", answers={STEP_TIME: Answer(mesh="tp=4", gap=0.0)}, seconds={"row": 1.0})
    append_row(path, row)
    append_row(path, row)
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_rows(path)) == [row]
    assert list(read_rows(tmp_path / "none")) == []


def test_third_party_modules_say_what_they_need_without_being_imported() -> None:
    loaded = set(sys.modules)
    needs = {module: packages_of(module) for module in THIRD_PARTY}
    assert needs["benchmarks.zoo.third_party.timm_models"] == ("timm",)
    assert all(needs.values()), "every module names its packages"
    assert installed([name for name, packages in needs.items() if not all(map(find_spec, packages))]) == []
    assert not {name for name in set(sys.modules) - loaded if "third_party" in name}


@pytest.mark.slow
def test_names_are_unique_and_ten_of_them_run_in_ci() -> None:
    names = [entry.name for entry in entries(MODULES)]
    assert len(names) == len(set(names))
    assert set(CI_ROWS) <= set(names)
    assert len(CI_ROWS) == 10

"""Published attention of one sequence over eight GPUs: what a row says, and what the planner makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.validation import score
from benchmarks.validation.data import Table, dev_tables
from benchmarks.validation.fields import Unpredictable
from benchmarks.validation.naive import naive
from benchmarks.validation.rows_attention import Shared, shared_of
from benchmarks.validation.schemas import Predicted, schema_named
from benchmarks.validation.shared_attention import seconds_of

ROW = {"group_num": "4", "batch": "2", "seq_len": "32K", "heads": "32", "head_dim": "64", "ulysses_degree": "2"}
ASKED = Shared(batch=2, tokens=32768, heads=32, key_heads=8, width=64, ulysses=2)


def test_a_row_says_tokens_heads_and_how_many_ranks_share_them() -> None:
    assert shared_of(ROW) == ASKED
    assert shared_of({**ROW, "seq_len": "512"}).tokens == 512
    with pytest.raises(Unpredictable, match="3 of 8 ranks"):
        shared_of({**ROW, "ulysses_degree": "3"})


def test_attention_of_all_ranks_takes_its_pairs_and_an_exchange() -> None:
    """Without an exchange 2 x 32 x 32,768^2 / 2 pairs of 4 x 64 FLOPs at 270 TFLOP/s on eight A100 take 4.1 ms."""
    ring, both, heads = (seconds_of(replace(ASKED, ulysses=ranks), "t1") for ranks in (1, 2, 8))
    assert 4.1e-3 < heads < 10e-3
    assert heads < both < 1.5 * heads
    assert heads < ring < 1.5 * heads


def test_twice_the_tokens_are_four_times_the_seconds() -> None:
    assert 3.5 < seconds_of(replace(ASKED, tokens=65536), "t1") / seconds_of(ASKED, "t1") < 4.2


def test_the_naive_rate_knows_no_exchange() -> None:
    schema = schema_named("usp_ulysses_ring_8xa100")
    rates = {
        naive([{**ROW, "ulysses_degree": degree}], schema, "attention")[0].values["zigzag_nopack"]
        for degree in ("1", "8")
    }
    assert len(rates) == 1
    assert 1 / rates.pop() < seconds_of(ASKED, "t1")


def test_the_file_lies_beside_those_under_dev(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "published").mkdir()
    path = tmp_path / "published" / "usp_ulysses_ring_8xa100.csv"
    path.write_text(f"{','.join(ROW)},zigzag_nopack\n{','.join(ROW.values())},78.3\n", encoding="utf-8")
    [table] = dev_tables(tmp_path, "attention")
    assert table.rows[0]["zigzag_nopack"] == "78.3"
    assert not dev_tables(tmp_path, "step")


def test_the_plan_with_most_calls_a_second_is_the_best_of_its_group() -> None:
    """Taken as seconds it would be the worst."""
    rates = {"1": 10.0, "2": 20.0, "8": 40.0}
    rows = tuple({**ROW, "ulysses_degree": ranks, "zigzag_nopack": str(rate)} for ranks, rate in rates.items())
    table = Table(name="f", schema=schema_named("usp_ulysses_ring_8xa100"), columns=tuple(rows[0]), rows=rows)
    told = [Predicted(values={"zigzag_nopack": rate}) for rate in (1.0, 3.0, 2.0)]
    [found] = score._rankings(table, "attention", "t1", told)
    assert found.error == pytest.approx(1 / 3)
    assert found.details["regret"] == pytest.approx(1.0)  # 20 calls a second where 40 were to be had

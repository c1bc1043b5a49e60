"""Rows of long contexts are joined by their question."""

import json
from pathlib import Path
from typing import Any

from benchmarks.long_contexts import keep


def _row(way: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"cluster": "8 H100-SXM", "way": way, "tokens": tokens, **more}


def test_rows_of_the_same_question_are_replaced_and_the_longest_that_fits_is_marked(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    output.write_text(json.dumps({"note": "two runs", "rows": [_row("ring", 4, peak_bytes=1), _row("ring", 2)]}))
    keep(output, [_row("ring", 4, error="no plan"), _row("gather", 4), _row("free", 8)])
    kept = json.loads(output.read_text())
    assert [(row["way"], row["tokens"], row["longest"]) for row in kept["rows"]] == [
        ("free", 8, True), ("ring", 2, True), ("ring", 4, False), ("gather", 4, True)
    ]  # fmt: skip
    assert kept["note"] == "two runs"
    assert "peak_bytes" not in kept["rows"][2]

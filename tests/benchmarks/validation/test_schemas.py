import os
from pathlib import Path

import pytest

from autopar.errors import ConfigurationError
from benchmarks.validation.data import VARIABLE, dev_tables, folder, read_table, write_table
from benchmarks.validation.schemas import KINDS, SCHEMAS, Schema, recognise, schema_named


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.name)
def test_measured_columns_and_others_predictions_are_no_inputs(schema: Schema) -> None:
    measured = {column for columns in schema.measured.values() for column in columns}
    assert not measured & set(schema.inputs)
    assert not set(schema.never_read) & (measured | set(schema.inputs))
    assert set(schema.recognised_by) <= set(schema.inputs)
    assert set(schema.groups) | set(schema.ranked_within) <= set(schema.inputs)
    assert set(schema.measured) <= set(KINDS)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.name)
def test_a_file_is_recognised_by_its_inputs_alone_and_with_all_its_columns(schema: Schema) -> None:
    assert recognise(schema.inputs) == schema
    assert recognise(schema.recognised_by).name in _twins(schema)
    assert recognise([*schema.columns, "split", "row_id"]) == schema


def _twins(schema: Schema) -> set[str]:
    """Schemas that the least columns of this one cannot tell from it."""
    return {other.name for other in SCHEMAS if set(other.recognised_by) <= set(schema.recognised_by)}


def test_the_inputs_of_a_row_hold_no_measurement() -> None:
    schema = schema_named("e2e_mem_simumax_b200")
    row = dict.fromkeys(schema.columns, "7")
    seen = schema.inputs_of(row)
    assert "microbatches" in seen
    assert not {"step_time_ms", "peak_alloc_gib", "simumax_pred_ms", "simumax_pred_gib"} & set(seen)


def test_unknown_columns_are_an_error_with_the_nearest_kind_of_file_and_what_it_misses() -> None:
    schema = schema_named("e2e_vtrain_a100_single")
    columns = [column for column in schema.inputs if column != "global_batch_seqs"]
    with pytest.raises(ConfigurationError, match=r"nearest is e2e_vtrain_a100_single.*global_batch_seqs") as error:
        recognise([*columns, "global_batch"])
    assert "you have global_batch" in str(error.value)


def test_a_kind_that_a_file_does_not_measure_is_an_error_with_its_kinds() -> None:
    with pytest.raises(ConfigurationError, match=r"op_vidur_linear hold no measurement of kind 'step'.*: op"):
        recognise(schema_named("op_vidur_linear").inputs, "step")


def test_comments_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "any name.csv"
    path.write_text(
        "# source: somewhere, with a comma\nkind,groups,M,N,K\n# half way\ndense_fp8,1,64,2112,7168\n\n",
        encoding="utf-8",
    )
    table = read_table(path)
    assert (table.schema.name, len(table.rows), table.rows[0]["K"]) == ("op_deepgemm_h800_fp8", 1, "7168")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "no rows"),
        ("kind,groups,M,N,K\n", "no rows"),
        ("kind,groups,M,N,K\na,1,2\n", "row 1: 3 fields, the header has 5"),
        ("kind,groups,M,M,N,K\na,1,2,2,3,4\n", "columns twice: M"),
    ],
)
def test_a_damaged_file_is_an_error_that_says_where(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=complaint):
        read_table(path)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    columns = ("kind", "groups", "M", "N", "K")
    write_table(tmp_path / "t.csv", columns, [dict(zip(columns, ("a, b", "1", "2", "3", "4"), strict=True))])
    assert read_table(tmp_path / "t.csv").rows[0]["kind"] == "a, b"
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]


def test_without_a_folder_of_measurements_the_error_says_how_to_name_one(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=VARIABLE):
        folder()
    with pytest.raises(ConfigurationError, match="no folder of measurements"):
        folder(tmp_path)


@pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"the measurements are elsewhere: set {VARIABLE}")
def test_every_file_of_the_collection_is_known_to_the_last_column() -> None:
    tables = dev_tables(folder())
    assert len(tables) >= 29
    for table in tables:
        assert set(table.columns) <= table.schema.columns, table.name

"""Reading and writing tables of measurements: CSV with units in the column names and `#` comment lines.

    table = read_table(folder() / "dev" / "op_vidur_linear.csv")
    table.columns, table.rows[0]["time_ms_median"], table.schema.name

The measurements are not part of this repository: `folder()` is the option --data or $AUTOPAR_GROUNDTRUTH.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import ConfigurationError
from autopar.files import write_atomically
from benchmarks.validation.schemas import SCHEMAS, Kind, Schema, recognise

VARIABLE = "AUTOPAR_GROUNDTRUTH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A file of measurements: the kind that its columns say, and its rows as text."""

    name: str
    schema: Schema
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]


def folder(chosen: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the measurements: `chosen`, else $AUTOPAR_GROUNDTRUTH.

    Raises ConfigurationError where neither names a folder with `dev/` in it.
    """
    named = os.fspath(chosen) if chosen is not None else os.environ.get(VARIABLE, "")
    if not named:
        raise ConfigurationError(f"which measurements? Give --data FOLDER or set ${VARIABLE}")
    path = Path(named)
    if not (path / "dev").is_dir():
        raise ConfigurationError(f"{named!r} is no folder of measurements: it has no dev/ with CSV files")
    return path


def read_table(path: str | os.PathLike[str], kind: Kind | None = None) -> Table:
    """Read a CSV and recognise its kind by its columns; lines that start with `#` are comments.

    Raises ConfigurationError where the file cannot be read, has no row, has a row of another length, or has columns
    of no known kind (or, with `kind`, no measurement of that kind).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {os.fspath(path)!r}: {error}") from error
    lines = [line for line in text.splitlines(keepends=True) if line.strip() and not line.startswith("#")]
    records = list(csv.reader(lines, strict=False))
    if len(records) < 2:
        raise ConfigurationError(f"{os.fspath(path)!r} has no rows: expected a header line and at least one row")
    columns = tuple(column.strip() for column in records[0])
    doubled = sorted({column for column in columns if columns.count(column) > 1})
    if doubled:
        raise ConfigurationError(f"{os.fspath(path)!r} has columns twice: {', '.join(doubled)}")
    for number, record in enumerate(records[1:], start=1):
        if len(record) != len(columns):
            raise ConfigurationError(
                f"{os.fspath(path)!r}, row {number}: {len(record)} fields, the header has {len(columns)}"
            )
    return Table(
        name=path.stem,
        schema=recognise(columns, kind),
        columns=columns,
        rows=tuple(dict(zip(columns, record, strict=True)) for record in records[1:]),
    )


def write_table(path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Write rows as CSV, atomically: a reader sees the old file or the whole new one."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, buffer.getvalue().encode())


def dev_tables(data: Path, kind: Kind | None = None) -> list[Table]:
    """Every file under `dev/`, in the order of names, and those that are scored of other folders; with `kind`, those
    that hold such measurements."""
    others = [data / schema.folder / f"{schema.name}.csv" for schema in SCHEMAS if schema.folder != "dev"]
    paths = [*sorted((data / "dev").glob("*.csv")), *filter(Path.exists, others)]
    tables = [read_table(path) for path in paths]
    return [table for table in tables if kind is None or kind in table.schema.measured]

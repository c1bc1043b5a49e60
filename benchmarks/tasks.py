"""What people come for, each in one command, on the real Llama-3-8B: the table of docs/tasks.md, run and timed.

    python -m benchmarks.tasks                              # all rows; writes benchmarks/results/tasks.json
    python -m benchmarks.tasks --only memory export --folder /tmp/walk     # some rows again, in a folder with plan.json
    python -m benchmarks.tasks --only pipe.json                            # the rows of one plan

Every row runs as a process of its own, in a folder that holds the configurations of docs/gallery (Llama-3-8B as
config.json; no weights). CPU seconds are those of the process and its children. A row that was not run keeps what was
measured before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import document, write_results

ROOT = Path(__file__).resolve().parent.parent
TASKS, GALLERY = ROOT / "docs" / "tasks.md", ROOT / "docs" / "gallery"
OUTPUT = ROOT / "benchmarks" / "results" / "tasks.json"
ROW = re.compile(r"^\| (.*?) \| `autopar (.*?)` \|", flags=re.MULTILINE)
KEY_LINES = 12
"""Lines of an answer that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command did. lines: of stdout; begins: the first of them."""

    task: str
    command: str
    exit_code: int
    cpu_seconds: float
    lines: int
    begins: list[str]


def tasks() -> dict[str, list[str]]:
    """Task -> the words behind `autopar`, in the order of the table."""
    return {task: shlex.split(line) for task, line in ROW.findall(TASKS.read_text())}


def answered(task: str, words: list[str], code: int, cpu_seconds: float, out: str) -> Answer:
    """The row of a command that has run."""
    lines = [line.rstrip() for line in out.splitlines()]
    return Answer(
        task=task,
        command=shlex.join(["autopar", *words]),
        exit_code=code,
        cpu_seconds=round(cpu_seconds, 1),
        lines=len(lines),
        begins=lines[:KEY_LINES],
    )


def run(task: str, words: list[str], folder: Path) -> Answer:
    """Run one command in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    with tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, "-m", "autopar", *words]
        child = subprocess.Popen(command, cwd=folder, env=environment, stdout=out)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return answered(task, words, child.returncode, used.ru_utime + used.ru_stime, out.read())


def prepared(folder: Path) -> Path:
    """The folder with the configurations that the commands name."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in GALLERY.glob("*.json"):
        shutil.copy(file, folder)
    shutil.copy(GALLERY / "llama-3-8b.json", folder / "config.json")
    return folder


def merged(rows: Mapping[str, Answer], path: Path) -> list[dict[str, Any]]:
    """All rows of the table: the new ones, else those of the file."""
    known = {row["task"]: row for row in json.loads(path.read_text())["tasks"]} if path.exists() else {}
    known |= {task: asdict(row) for task, row in rows.items()}
    return [known[task] for task in tasks() if task in known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="Words of a row's command: plan, memory, pipe.json, ...")
    parser.add_argument("--folder", type=Path, help="Where the files stay. Default: a folder that is deleted.")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--json", action="store_true", help="Print the document instead of a line per row.")
    arguments = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepared(arguments.folder or Path(temporary))
        for task, words in tasks().items():
            if arguments.only is None or set(words) & set(arguments.only):
                rows[task] = run(task, words, folder)
                print(f"{rows[task].cpu_seconds:8.1f} CPU s  exit {rows[task].exit_code}  {task}", file=sys.stderr)
    content = {"command": "python -m benchmarks.tasks", "tasks": merged(rows, arguments.output)}
    write_results(arguments.output, content)
    if arguments.json:
        print(json.dumps(document(content), indent=1))
    sys.exit(any(row.exit_code for row in rows.values()))


if __name__ == "__main__":
    main()

"""The golden files on disk: one folder per case under `files/`, its texts in files of their own."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping
from pathlib import Path

from autopar._compat import torch_version

FILES = Path(__file__).parent / "files"
UPDATE = "python -m tests.golden --update"
TORCH = (2, 13)
"""The version of torch whose graphs the files show; another one may capture other operators."""
SAME_TORCH = torch_version() == TORCH


def stored(name: str) -> dict[str, str]:
    """File name -> text of a case; empty for one that was never written."""
    return {path.name: path.read_text() for path in sorted((FILES / name).glob("*.txt"))}


def write(name: str, texts: Mapping[str, str]) -> None:
    """Put these texts in the place of the case's."""
    shutil.rmtree(FILES / name, ignore_errors=True)
    (FILES / name).mkdir(parents=True)
    for file, text in texts.items():
        (FILES / name / file).write_text(text)


def difference(name: str, texts: Mapping[str, str]) -> str:
    """Unified diff from the stored texts to these, empty where they are equal."""
    before = stored(name)
    lines: list[str] = []
    for file in sorted(before.keys() | texts.keys()):
        old, new = (found.get(file, "").splitlines() for found in (before, texts))
        lines += difflib.unified_diff(old, new, f"stored/{name}/{file}", f"made/{name}/{file}", lineterm="", n=1)
    return "\n".join(lines)

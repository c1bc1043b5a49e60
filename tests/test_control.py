"""The examples of docs/control.md, run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "control.md"


@pytest.mark.slow
def test_the_examples_of_the_page_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    namespace: dict[str, object] = {"__name__": "control"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)

"""`autopar report` says which file it wrote, and how large it is."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from autopar.cli.report_command import report
from tests.plans.test_plan_text import small_plan


def test_the_command_names_the_page_and_its_size(tmp_path: Path) -> None:
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    small_plan().save(path)
    done = CliRunner().invoke(report, [str(path)])
    assert done.exit_code == 0, done.output
    size = page.stat().st_size
    assert done.stdout == f"{page}: {size / 1e6:.2f} MB\n"
    document = json.loads(CliRunner().invoke(report, [str(path), "--json"]).stdout)
    assert document == {"report": str(page), "bytes": size}

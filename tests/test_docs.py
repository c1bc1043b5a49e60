"""The `python` and `console` blocks of docs/ run as they stand, page by page, in one process (README: test_quickstart).

A page's Python blocks share their names, and all blocks of a page a folder with config.json, a small GPT-2. Blocks
behind a line "Not run here (why):" are compiled, and their commands looked up, but not run.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

import autopar
from autopar.cli.commands import commands
from tests.cli.test_examples import CONFIG

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = "Not run here"
FRAMEWORK_PAGES = {
    "accelerate": "accelerate",
    "trainer": "trainer",
    "lightning": "lightning",
    "fabric": "lightning",
    "peft": "peft",
    "precision": "precision",
    "optimizers": "precision",
    "torchao": "precision",
}
QUOTED = re.compile(r"`([^`]+)`")
SOURCES = ("autopar", "cost_models", "passes", "runtime")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    runs: bool
    line: int

    @property
    def commands(self) -> list[list[str]]:
        """The words behind `$`, of a console block."""
        return [shlex.split(line[2:]) for line in self.text.splitlines() if line.startswith("$ ")]


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page's text, in their order."""
    found = []
    for match in BLOCK.finditer(page):
        lines = [line for line in page[: match.start()].splitlines() if line.strip()]
        before = lines[-1] if lines else ""
        found.append(Block(match[1], match[2], not before.startswith(NOT_RUN), page[: match.start()].count("\n") + 1))
    return found


def run_block(block: Block, names: dict[str, object], where: str) -> None:
    """Run, or only check, one block. names: those of the page so far."""
    if block.language == "python":
        code = compile("\n" * block.line + block.text, where, "exec")
        if block.runs:
            exec(code, names)
        return
    for words in block.commands:
        if words[0] != "autopar":
            assert not block.runs, f"{where}:{block.line}: only `autopar` commands are run: {words}"
        elif block.runs:
            assert not commands.main(args=words[1:], standalone_mode=False), f"{where}:{block.line}: {words}"
        else:
            assert commands.get_command(None, words[1]) is not None, f"{where}:{block.line}: no command {words[1]}"  # type: ignore[arg-type]  # click asks for no context here


@pytest.mark.exhaustive(
    sample=["precision", "training-script", "troubleshooting", "extending", "deterministic", "custom-operators"]
)
@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in PAGES if blocks_of(p.read_text())], ids=lambda path: path.stem)
def test_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    names: dict[str, object] = {"__name__": path.stem}
    for block in blocks_of(path.read_text()):
        run_block(block, names, path.name)


def test_a_block_that_is_wrong_fails() -> None:
    page = "```python\na = 1\n```\nNot run here (x):\n\n```python\nassert False\n```\n\n```python\nassert a == 2\n```\n"
    names: dict[str, object] = {}
    first, skipped, wrong = blocks_of(page)
    run_block(first, names, "page")
    run_block(skipped, names, "page")
    with pytest.raises(AssertionError):
        run_block(wrong, names, "page")
    with pytest.raises(SyntaxError):
        run_block(Block("python", "def", False, 1), names, "page")


def test_every_public_name_has_an_example() -> None:
    text = "\n".join(block.text for block in blocks_of((DOCS / "api.md").read_text()))
    assert [name for name in autopar.__all__ if f"autopar.{name}" not in text] == []


def test_every_error_class_has_its_section() -> None:
    sections = re.findall(r"^## (\w+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    errors = {name for name in autopar.__all__ if name.endswith("Error")} - {"AutoparError"}
    assert errors <= set(sections)


def test_the_index_names_every_page_and_links_lead_somewhere() -> None:
    index = (DOCS / "index.md").read_text()
    assert [path.name for path in DOCS.glob("*.md") if path.name != "index.md" and f"]({path.name})" not in index] == []
    for path in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", BLOCK.sub("", path.read_text())):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def beginnings(page: str) -> list[str]:
    """The quoted messages of a page's tables of errors, `<>` where they differ from case to case."""
    tables = re.findall(r"^\| the message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    return [re.sub(r"<[^>]*>", "<>", quoted) for row in rows for quoted in QUOTED.findall(row.split(" | ")[0])]


def texts_of(source: str) -> str:
    """A program in which strings of several lines are one, with `<>` for what is put into them."""
    return re.sub(r"{(?:[^{}]|{[^{}]*})*}|%[sd]", "<>", re.sub(r"""["']\s*\n\s*f?["']""", "", source))


def test_the_errors_of_the_documentation_are_those_of_the_sources() -> None:
    quoted = beginnings((DOCS / "troubleshooting.md").read_text())
    assert len(quoted) > 80
    files = [path for folder in SOURCES for path in (ROOT / folder).resolve().rglob("*.py")]
    texts = "\n".join(texts_of(path.read_text()) for path in files)
    assert [each for each in quoted if f'"{each}' not in texts and f"'{each}" not in texts] == []


def test_a_quoted_error_is_found_by_what_does_not_change() -> None:
    page = "| the message | why | what to do |\n|---|---|---|\n| `a <name> is`, or `b` | `c` | d |\n\n| `e` | f | g |\n"
    assert beginnings(page) == ["a <> is", "b"]
    assert texts_of('f"a {1} "\n  f"is {2}: x"; log("%s ends", 3)') == 'f"a <> is <>: x"; log("<> ends", 3)'


def test_the_page_of_a_framework_names_every_checked_feature() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "frameworks.json").read_text())
    for row in results["rows"]:
        framework, _, feature = row["name"].partition("/")
        page = " ".join(BLOCK.sub("", (DOCS / f"{FRAMEWORK_PAGES[framework]}.md").read_text()).split())
        assert all(part in page for part in feature.split(", ")), row["name"]
        if row["verdict"] == "refused":
            says = row["says"].partition("Error: ")[2]
            assert any(len(quoted) > 30 and says.startswith(quoted) for quoted in QUOTED.findall(page)), says
        else:
            assert row["says"] in page, row["name"]

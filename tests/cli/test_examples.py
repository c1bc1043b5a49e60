"""The example in every help text runs as it stands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from autopar.cli.commands import commands
from tests.cli.test_commands import autopar

pytestmark = pytest.mark.usefixtures("shared_captures")

ELSEWHERE = {"calibrate", "demo", "import", "profile", "run", "verify"}
"""They train, measure for minutes, start processes, or read what those wrote: tests of their own run them."""
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 32, "n_head": 4,
    "vocab_size": 96, "n_positions": 128,
}  # fmt: skip


def _leaves(group: click.Group, path: Sequence[str] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _leaves(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = {" ".join(path): command for path, command in _leaves(commands)}


def example_of(name: str) -> list[str]:
    """The words behind `autopar` in the help of a command."""
    lines = [line.strip() for line in (COMMANDS[name].help or "").splitlines()]
    examples = [line.removeprefix("Example: ") for line in lines if line.startswith("Example: ")]
    assert len(examples) == 1, f"the help of {name!r} has {len(examples)} examples"
    words = shlex.split(examples[0])
    assert words[: 1 + len(name.split())] == ["autopar", *name.split()]
    return words[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json, and what the example of `plan` makes of it."""
    found = tmp_path_factory.mktemp("examples")
    (found / "config.json").write_text(json.dumps(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        done = autopar(*example_of("plan"), "--mode", "fast")
    assert done.returncode == 0, done.stderr
    (found / "tp4.json").write_bytes((found / "plan.json").read_bytes())
    return found


@pytest.mark.exhaustive(sample=["edit", "explain", "what-if"])
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - ELSEWHERE - {"plan"}))
def test_an_example_runs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AUTOPAR_CACHE", str(folder / "cache"))
    done = autopar(*example_of(name))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_an_example_is_understood(name: str) -> None:
    words = example_of(name)[len(name.split()) :]
    assert COMMANDS[name].make_context(name, list(words)).params is not None

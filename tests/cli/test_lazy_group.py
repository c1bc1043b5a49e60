"""Commands that are loaded when they are called."""

from __future__ import annotations

import click
import pytest

from autopar.cli.commands import COMMANDS, commands
from tests.cli.test_commands import autopar


def test_every_row_of_the_table_is_a_command() -> None:
    context = click.Context(commands)
    for entry in COMMANDS:
        command = commands.get_command(context, entry.name)
        assert command is not None
        assert command.name == entry.name
        assert command.help
    assert commands.get_command(context, "nonsense") is None


def test_the_help_lists_the_table_and_fits_a_line_each() -> None:
    lines = autopar("--help").stdout.splitlines()
    listed = [line.split() for line in lines[lines.index("Commands:") + 1 :]]
    assert [words[0] for words in listed] == sorted(entry.name for entry in COMMANDS)
    said = {words[0]: " ".join(words[1:]) for words in listed}
    assert said == {entry.name: entry.help for entry in COMMANDS}


@pytest.mark.parametrize(
    ("words", "near"),
    [("paln", "Did you mean 'plan'?"), ("plan any:model --mode defualt", "Did you mean 'default'?"),
     ("plan any:model --precision bf61", "Did you mean 'bf16'?"), ("plan any:model --optimizer adamww", "'adamw'?"),
     ("plan any:model --cluster her", 'did you mean "here"'), ("plan any:model --cluster 8xL4", 'did you mean "8 L4"'),
     ("plan any:model --cluster 8-L4 --dims dp_shrad=8", 'did you mean "8 L4"'),
     ("export plan.json --to megatorn", "'megatron'?")],
)  # fmt: skip
def test_a_mistyped_word_is_refused_with_the_one_that_is_meant(words: str, near: str) -> None:
    done = autopar(*words.split())
    assert (done.returncode, near in done.stderr) == (2, True), done.stderr


def test_a_mistyped_axis_is_refused_before_the_model_is_looked_for() -> None:
    done = autopar("plan", "hf:none.json", "--cluster", "8 L4", "--dims", "dp_shrad=8")
    assert (done.returncode, 'did you mean "dp_shard"' in done.stderr) == (2, True), done.stderr

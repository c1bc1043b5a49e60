"""A group of commands that loads the module of a command only where that command is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from autopar.nearest_name import nearest_name


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command of a group: its name, its module in `autopar.cli`, its name there, its line in the group's help."""

    name: str
    module: str
    attribute: str
    help: str


class LazyGroup(click.Group):
    """A group whose commands stand in a table. `entries`: the rows by name."""

    def __init__(self, *args: Any, entries: Sequence[CommandEntry] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries: Mapping[str, CommandEntry] = {entry.name: entry for entry in entries}

    def list_commands(self, ctx: click.Context | None) -> list[str]:
        """The names in order; completion asks for them, too."""
        return sorted(self.entries)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """The command of a name, from its module; None where there is none."""
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        found = getattr(importlib.import_module(f"autopar.cli.{entry.module}"), entry.attribute)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, and for a mistyped name with the nearest one."""
        if args[0] not in self.entries and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = nearest_name(args[0], self.entries)
            meant = "" if near is None else f" Did you mean {near!r}?"
            ctx.fail(f"No such command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, in the help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.entries[name].help) for name in self.list_commands(ctx)])

"""`autopar cache`: the measured profiles that autopar keeps, and how to be rid of them."""

from __future__ import annotations

import datetime

import click
from rich.console import Console

from autopar.cli.output import as_json_option, print_document
from autopar.files import cache_directory
from autopar.plans.plan_text import format_bytes
from autopar.report.terminal_tables import table


@click.command()
@click.option("--clear", is_flag=True, help="Delete the files; `autopar profile` measures again.")
@as_json_option
def cache(clear: bool, as_json: bool) -> None:
    """List measured profiles of this machine, or delete them.

    Example: autopar cache
    """
    folder = cache_directory()
    files = sorted(path for path in folder.rglob("*.json") if path.is_file())
    sizes = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime) for path in files]
    if clear:
        for path in files:
            path.unlink()
    if as_json:
        listed = [{"file": name, "bytes": size} for name, size, _ in sizes]
        print_document({"folder": str(folder), "deleted": clear, "files": listed})
        return
    rows = [
        (name, format_bytes(size), datetime.datetime.fromtimestamp(at).isoformat(" ", "minutes"))
        for name, size, at in sizes
    ]
    Console().print(table(str(folder), ("file", "size", "written"), rows))
    if clear:
        click.echo(f"{len(files)} files deleted")

"""`autopar demo`: the two minutes that show what autopar does."""

from __future__ import annotations

import click
from rich.console import Console

from autopar.cli.output import as_json_option, print_document
from autopar.demo.journey import run_demo


@click.command()
@as_json_option
def demo(as_json: bool) -> None:
    """Plan a GPT for 2x8 H100 on this machine, then train one on four local processes.

    Example: autopar demo
    """
    results = run_demo(Console(stderr=as_json))
    if as_json:
        print_document(results)

"""`autopar demo`: the minutes that show what autopar does."""

from __future__ import annotations

import click
from rich.console import Console

from autopar.cli.output import as_json_option, print_document
from autopar.demo.journey import run_demo


@click.command()
@as_json_option
def demo(as_json: bool) -> None:
    """Plan a GPT for 16 GPUs on this machine, then train one on local processes, beside plain torch.

    Example: autopar demo
    """
    results = run_demo(Console(stderr=as_json))
    if as_json:
        print_document(results)

"""`autopar show`: a plan file as tables, or the program of one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from autopar.cli.bound_plan import bound, given_options
from autopar.cli.output import as_json_option, print_answer
from autopar.cli.printed_plan import print_plan, verbose_option
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_folding import folded


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--code", "rank", type=click.IntRange(min=0), help="The program of this rank instead, line by line.")
@click.option("--whole", is_flag=True, help="With --code on a terminal: repeated layers too. A pipe gets all lines.")
@verbose_option
@given_options
@as_json_option
def show(path: Path, rank: int | None, whole: bool, verbose: bool, as_json: bool, **given: Any) -> None:
    """Print the plan file PATH, or with --code the program that one rank runs; on a terminal through the pager, with
    repeated layers folded.

    Example: autopar show plan.json
    """
    if rank is None:
        print_plan(Plan.load(path), as_json, verbose)
        return
    asked = bound(path, given)
    found = asked.plan.code(rank)
    if as_json or not sys.stdout.isatty():
        print_answer(found, as_json)
    else:
        click.echo_via_pager(found.text if whole else folded(found.text))

"""`autopar rules`: look up sharding rules, propose them, and list the operators of a model that have none.

autopar rules show aten::mm
autopar rules discover mylib::op --import my.module --example 'randn(6, 12), randn(12, 18)'
autopar rules coverage pkg.module:factory --cluster "2x8 H100-SXM"
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
import torch
from rich.console import Console

from autopar.capture import capture
from autopar.capture.models import load_model
from autopar.cli.options import read_cluster
from autopar.cli.output import as_json_option, print_document
from autopar.errors import ConfigurationError
from autopar.report.coverage import COLUMNS, coverage, coverage_rows
from autopar.report.terminal_tables import table
from autopar.rules.alternatives import alternatives_for
from autopar.rules.discovery import discover
from autopar.rules.engine import described_rule
from autopar.rules.registration import find_operator

import_option = click.option(
    "--import", "modules", multiple=True, help="A module that defines the operator; may be given several times."
)

MAKERS = ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros")
"""Functions of torch that an example may call."""


@click.group()
def rules() -> None:
    """Sharding rules: look them up, propose them, see which are missing."""


@rules.command()
@click.argument("operator")
@import_option
@as_json_option
def show(operator: str, modules: Sequence[str], as_json: bool) -> None:
    """Print the rule of OPERATOR (aten::mm, mylib::op.overload).

    Example: autopar rules show aten::mm
    """
    _import(modules)
    found = find_operator(operator)
    text, alternatives = described_rule(found), alternatives_for(found)
    if as_json:
        runs_as = {way.name: {"operator": str(way.target), "says": way.says} for way in alternatives}
        print_document({"operator": operator, "rule": text, "alternatives": runs_as})
    else:
        for way in alternatives:
            click.echo(f"also {way.name} under precision={way.precision!r}: {way.target}, {way.says}", err=True)
        click.echo(text or f"{operator} has no rule; autopar rules discover {operator} proposes one")


@rules.command(name="discover")
@click.argument("operator")
@click.option("--example", help="Its positional arguments: 'randn(6, 12), randn(12, 18)'. Default: made up.")
@import_option
@click.option("--fresh", is_flag=True, help="Try again instead of taking the cached answer.")
@as_json_option
def discover_command(operator: str, example: str | None, modules: Sequence[str], fresh: bool, as_json: bool) -> None:
    """Propose a rule for OPERATOR by trying how it may be split, in a child process.

    Example: autopar rules discover aten::triu --example "randn(6, 12)"
    """
    _import(modules)
    arguments = None if example is None else _example(example)
    found = discover(operator, arguments, use_cache=not fresh)
    if as_json:
        print_document(asdict(found))
        return
    crashed = f", {found.crashes} crashed" if found.crashes else ""
    click.echo(f"{found.trials} ways to cut the operands were tried{crashed}", err=True)
    if found.rule is None:
        click.echo(f"{operator}: no split was found; it runs whole on every device")
    else:
        given = f", example=({example},)" if example else ""
        click.echo(f'autopar.register_rule("{operator}", "{found.rule}"{given})')


@rules.command(name="coverage")
@click.argument("model")
@click.option("--cluster", default="here", show_default=True, help='"2x8 H100-SXM", a cluster file, or "here".')
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Global batch.")
@click.option("--seq", type=click.IntRange(min=1), default=128, show_default=True, help="Sequence length.")
@import_option
@as_json_option
def coverage_command(model: str, cluster: str, batch: int, seq: int, modules: Sequence[str], as_json: bool) -> None:
    """List every operator of MODEL (pkg.module:factory or hf:CONFIG.json) without a rule, and what that costs.

    Example: autopar rules coverage hf:config.json --batch 8 --seq 32
    """
    _import(modules)
    module, inputs = load_model(model, batch, seq)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    found = coverage(capture(module, args, kwargs), read_cluster(cluster))
    if as_json:
        print_document(asdict(found))
        return
    covered = found.calls - sum(gap.calls for gap in found.gaps)
    click.echo(f"{model}: {found.operators} operators in {found.calls} calls, {covered} of them have a rule")
    if found.gaps:
        Console().print(table("without a rule", COLUMNS, coverage_rows(found)))


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigurationError(f"cannot import {module!r}: {error}") from error


def _example(text: str) -> tuple[Any, ...]:
    """Arguments as Python writes them: numbers, words, lists, dtypes, and tensors by `MAKERS`: 'randn(6, 12), [1]'."""
    torch.manual_seed(0)
    try:
        return tuple(_value(ast.parse(f"({text},)", mode="eval").body))
    except (SyntaxError, TypeError, ValueError, RuntimeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ConfigurationError(
            f"cannot read the example {text!r}: {error}; write for instance 'randn(6, 12), [1], True'"
        ) from error


def _value(node: ast.expr) -> Any:
    """What a node of the example says; a text is read, never run. Raises ValueError for other Python."""
    match node:
        case ast.Tuple(elts=elements):
            return tuple(map(_value, elements))
        case ast.List(elts=elements):
            return list(map(_value, elements))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in MAKERS:
            keywords = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
            return getattr(torch, name)(*map(_value, node.args), **keywords)
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="torch"), attr=name):
            if isinstance(found := getattr(torch, name, None), torch.dtype):
                return found
            raise ValueError(f"{name} is neither a dtype nor one of {', '.join(MAKERS)}")
        case ast.Call():
            raise ValueError(f"{ast.unparse(node)} calls something else than {', '.join(MAKERS)}")
    return ast.literal_eval(node)

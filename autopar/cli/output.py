"""What commands print: tables for people, or with `--json` exactly one document on stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import click

as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


class Answer(Protocol):
    """What a plan answers: a text and a document."""

    def document(self) -> dict[str, Any]:
        """The answer as JSON values."""


def print_answer(answer: Answer, as_json: bool) -> None:
    """The answer as one JSON document, or as text."""
    if as_json:
        print_document(answer.document())
    else:
        click.echo(str(answer))


def print_document(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, indent=1))


def print_question(question: Mapping[str, Any]) -> None:
    """Every option with its value, defaults too, on stderr."""
    click.echo(" ".join(f"{name}={value}" for name, value in question.items() if value not in (None, (), [])), err=True)

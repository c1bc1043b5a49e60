"""What commands print: tables for people, or with `--json` exactly one document on stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

as_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def print_document(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, indent=1))

"""How benchmarks keep what they measured: one JSON document with the date and the machine, under benchmarks/results."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from autopar.files import write_atomically
from autopar.hardware.cluster import machine_name


def document(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with where, when and with which versions it was measured."""
    versions = {name: version(name) for name in ("transformers", "ortools", "numpy") if find_spec(name)}
    measured = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_name(),
        "torch": str(torch.__version__),
        **versions,
    }
    return {"measured": measured, **content}


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write the document of `content`."""
    write_atomically(path, json.dumps(document(content), indent=1).encode() + b"\n")


def commit() -> str:
    """The commit from which a benchmark runs."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

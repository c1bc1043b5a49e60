"""How benchmarks keep what they measured: one JSON document with the date and the machine, under benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from autopar.cluster import machine_name
from autopar.files import write_atomically


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Write `document` with where and when it was measured."""
    measured = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_name(),
        "torch": str(torch.__version__),
    }
    write_atomically(path, json.dumps({"measured": measured, **document}, indent=1).encode() + b"\n")

"""Where a stage ran: device, driver and versions, as every result file says them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from autopar.hardware.cluster import machine_name
from benchmarks.gpu.stage import Place, Row

COMMIT_FILE = "commit"
"""In the folder that is carried: a machine without git does not know which commit it runs."""
DRIVER = ("nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader")


def facts(place: Place) -> Iterator[Row]:
    """One row: the device and all versions. Touches CUDA."""
    yield {"case": "machine", "device": _device(place), "versions": _versions(place), "commit": commit(place.carried)}


def _device(place: Place) -> Row:
    if not place.on_cuda:
        return {"kind": "cpu", "name": machine_name(), "count": os.cpu_count()}
    properties = torch.cuda.get_device_properties(place.device)
    return {
        "kind": "cuda",
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(place.device)),
        "multiprocessors": properties.multi_processor_count,
        "driver, power limit, largest clock": said(DRIVER).splitlines()[:1],
    }


def _versions(place: Place) -> Row:
    found: Row = {"python": platform.python_version(), "torch": str(torch.__version__), "cuda": torch.version.cuda}
    for name in ("triton", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if place.on_cuda:
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        nccl: Any = torch.cuda.nccl
        found["nccl"] = list(nccl.version()) if torch.distributed.is_nccl_available() else None
    return found


def commit(carried: Path | None) -> str | None:
    """As it was carried, since a machine that a tree was copied to may have another history; else of this checkout."""
    file = carried / COMMIT_FILE if carried is not None else None
    if file is not None and file.exists():
        return file.read_text().strip() or None
    return said(("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")) or None


def said(command: tuple[str, ...]) -> str:
    """What a command prints; "" where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""

"""Where autopar keeps what it measured, and how it writes a file that no reader sees half-written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """The folder of measured profiles: `$AUTOPAR_CACHE`, else `~/.cache/autopar`. It need not exist yet."""
    chosen = os.environ.get("AUTOPAR_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "autopar"


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write beside `path`, then rename: readers see the old file or the new one, never a part."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

"""Where autopar keeps what it measured, and how it writes a file that no reader sees half-written."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from autopar.errors import ConfigurationError


def cache_directory() -> Path:
    """The folder of measured profiles: `$AUTOPAR_CACHE`, else `~/.cache/autopar`. It need not exist yet."""
    chosen = os.environ.get("AUTOPAR_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "autopar"


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write beside `path`, then rename: readers see the old file or the new one, never a part. Links are followed.

    Raises ConfigurationError where `path` is no regular file, and for what the system refuses (a full disk, a closed
    folder); the old file is there then as it was.
    """
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        refuse_other_nodes(target)
        _write_beside(target, content)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error


def refuse_other_nodes(path: Path) -> None:
    """Raises ConfigurationError where there is something else than a regular file at `path`."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ConfigurationError(f"{path} is {_kind(mode)}: name a regular file, or a new one")


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_one, name in kinds if is_one(mode)), "a device")


def _write_beside(target: Path, content: bytes) -> None:
    """With the permissions of the old file, or those that new files have here."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if target.exists():
                os.fchmod(handle, stat.S_IMODE(target.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

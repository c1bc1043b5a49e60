"""Files: where autopar keeps what it measured, files that are read as data and nothing else, and files written whole.

    decoded_json(file_content("plan.json", "the plan"), "plan.json")      a document, or a ConfigurationError

Nothing else opens a file that a user names: so all of them have one bound, one encoding and one kind of error.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autopar.errors import ConfigurationError

Record = TypeVar("Record")
MOST_BYTES = 100_000_000
"""Of a file that is read; a plan of 198 MB did not load within a minute."""


def cache_directory() -> Path:
    """The folder of measured profiles: `$AUTOPAR_CACHE`, else `~/.cache/autopar`. It need not exist yet."""
    chosen = os.environ.get("AUTOPAR_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "autopar"


def file_content(path: str | os.PathLike[str], origin: str) -> bytes:
    """The bytes of a file. origin: what to call it in an error.

    Raises ConfigurationError where it cannot be read or has more than `MOST_BYTES`; no more of it is read then.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise ConfigurationError(f"cannot read {origin}: {getattr(error, 'strerror', None) or error}") from error
    _check_size(content, origin)
    return content


def _check_size(content: bytes, origin: str) -> None:
    if len(content) > MOST_BYTES:
        raise ConfigurationError(f"{origin} has more than the {MOST_BYTES:,} bytes that are read")


def decoded_text(content: bytes, origin: str) -> str:
    """The text of UTF-8. Raises ConfigurationError for bytes that are none, and for more than `MOST_BYTES`."""
    _check_size(content, origin)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{origin} is damaged: byte {error.start} is no UTF-8") from error


def decoded_json(content: bytes, origin: str) -> Any:
    """The document of a JSON text. origin: what to call it in an error.

    Raises ConfigurationError for what is no JSON in UTF-8, and for what a reader could take in two ways: a key that
    stands twice, and numbers that no float holds.
    """
    text = decoded_text(content, origin)
    try:
        return json.loads(text, object_pairs_hook=_entries, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ConfigurationError(f"{origin} is damaged: its entries are nested too deeply") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigurationError(f"{origin} is damaged: JSON is malformed ({error.msg.lower()}: {place})") from error
    except ValueError as error:
        raise ConfigurationError(f"{origin} is damaged: {error}") from error


def as_record(content: bytes, kind: type[Record], origin: str) -> Record:
    """The document of a JSON text as a dataclass. Raises ConfigurationError as `decoded_json`, and naming the entry of
    another type."""
    try:
        return msgspec.convert(decoded_json(content, origin), type=kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{origin} is damaged: {error}") from error


def _entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


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


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk, so that what was renamed there is found after a loss of power.
    Raises OSError. File systems that have no such thing are left as they are."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


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

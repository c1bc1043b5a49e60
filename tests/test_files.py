"""Files are written whole or not at all, and only where a file belongs."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from autopar import files
from autopar.errors import ConfigurationError
from autopar.files import write_atomically


def test_a_new_file_has_the_permissions_of_new_files_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    new, old = tmp_path / "deep" / "new.json", tmp_path / "old.json"
    old.write_text("before")
    old.chmod(0o640)
    umask = os.umask(0o022)
    try:
        for path in (new, old):
            write_atomically(path, b"after")
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (new, old)] == [0o644, 0o640]
    assert new.read_text() == old.read_text() == "after"


def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path) -> None:
    kept, link = tmp_path / "plans" / "today.json", tmp_path / "plan.json"
    kept.parent.mkdir()
    kept.write_text("before")
    link.symlink_to(kept)
    write_atomically(link, b"after")
    assert link.is_symlink()
    assert kept.read_text() == "after"


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a socket", "a device"])
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    path = Path("node")
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path = Path("/dev/null")
    before = path.stat().st_mode
    with pytest.raises(ConfigurationError, match=f"is {kind}: name a regular file"):
        write_atomically(path, b"content")
    assert path.stat().st_mode == before


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_what_fails_half_way_leaves_the_old_file_alone(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        opened = os.fdopen
        monkeypatch.setattr(files.os, "fdopen", lambda handle, mode: _Full(opened(handle, mode)))
    else:
        monkeypatch.setattr(files.os, call, full)
    with pytest.raises(ConfigurationError, match="No space left on device; nothing was changed"):
        write_atomically(path, b"after")
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "before"


class _Full:
    """A file on a full disk."""

    def __init__(self, file: object) -> None:
        self._file = file

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # type: ignore[attr-defined]

    def write(self, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot write .*file/plan.json: (File exists|Not a directory)"):
        write_atomically(tmp_path / "file" / "plan.json", b"")

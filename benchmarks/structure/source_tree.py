"""The modules of a source tree as syntax trees: nothing is imported, so any commit can be read.

    read_modules(Path("."), "autopar")["autopar.planner.solver.messages"].tree  ->  ast.Module

Links are followed: `autopar/passes` is `passes/` of the root.
"""

from __future__ import annotations

import ast
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModule:
    """One file. name: dotted, that of a package for its `__init__`; path: relative to the root of the tree."""

    name: str
    path: str
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether the file is the `__init__` of a package."""
        return self.path.endswith("__init__.py")

    @property
    def lines(self) -> int:
        """Lines of the file, blank ones and comments included."""
        return self.text.count("\n")


def read_modules(root: Path, package: str) -> dict[str, SourceModule]:
    """Name -> module of every file of a package at the root of a tree."""
    found = {}
    for folder, folders, names in os.walk(root / package, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder) / name
                parts = path.relative_to(root).with_suffix("").parts
                dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                text = path.read_text()
                found[dotted] = SourceModule(
                    name=dotted, path=path.relative_to(root).as_posix(), text=text, tree=ast.parse(text)
                )
    return found


@contextmanager
def tree_at(root: Path, commit: str) -> Iterator[Path]:
    """A folder with the files of `commit`, gone afterwards. Raises CalledProcessError for an unknown commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=root, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def commit_of(root: Path, name: str = "HEAD") -> str:
    """The full hash of a commit. Raises CalledProcessError for an unknown one."""
    command = ["git", "rev-parse", "--verify", f"{name}^{{commit}}"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def is_changed(root: Path) -> bool:
    """Whether files of the tree differ from its last commit."""
    status = ["git", "status", "--porcelain", "--untracked-files=no"]
    return bool(subprocess.run(status, cwd=root, capture_output=True, text=True, check=True).stdout.strip())

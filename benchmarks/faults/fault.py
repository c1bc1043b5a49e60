"""A fault as data: what is done, on how many processes, and what must come of it.

    @fault(3, "rank 1 passes another batch", on=("dp2", "tp4"), words=("rank 1", "data_shard"))
    def another_batch(scene): ...                # runs on every process; two faults, one per layout

Two ends are good: right (the function returns; it raises Wrong where something is not what the plain model computes),
where the fault says `right`, and refused (an AutoparError in which all `words` stand), where it has any.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from autopar.errors import AutoparError

SECONDS = 20.0
"""After which a fault that has not ended hangs."""

LAYOUTS: Mapping[str, tuple[int, Mapping[str, int] | None]] = MappingProxyType(
    {
        "alone": (1, None),
        "dp2": (2, {"dp_replicate": 2}),
        "shard2": (2, {"dp_shard": 2}),
        "tp2": (2, {"tp": 2}),
        "pp2": (2, {"pp": 2}),
        "dp4": (4, {"dp_replicate": 4}),
        "shard4": (4, {"dp_shard": 4}),
        "tp4": (4, {"tp": 4}),
        "shard2tp2": (4, {"dp_shard": 2, "tp": 2}),
        "pp2shard2": (4, {"pp": 2, "dp_shard": 2}),
    }
)
"""Name -> processes, and the `dims` that are asked for."""

POINTS: Mapping[int, str] = MappingProxyType(
    {
        1: "processes that do not know of each other",
        2: "other weights on some rank",
        3: "other batches on some rank",
        4: "other calls on some rank",
        5: "an optimizer of other parameters",
        6: "Python state that changes behind capture",
        7: "hooks",
        8: "gradients through other outputs",
        9: "gradients of inputs",
        10: "weights between forward and backward, clipping over stages",
        11: "checkpoints",
        12: "lost ranks",
        13: "numbers without bounds",
        14: "code named by files",
        15: "output paths",
        16: "damaged files and arguments",
        17: "ways of use and values at the edge",
    }
)
"""The classes of faults."""

PROTECTED = "protected.jsonl"


class Wrong(Exception):
    """Something was computed, kept or run that should not: nobody was told."""


class RefusedByCommand(AutoparError):
    """The command line ended with one of its exit codes and a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a process of a fault stands: its rank, the asked `dims`, and a folder that all processes share."""

    rank: int
    processes: int
    dims: Mapping[str, int] | None
    folder: Path

    def protect(self, *paths: Path) -> None:
        """From here on these files and folders must stay as they are, whatever happens to the processes."""
        with (self.folder / PROTECTED).open("a") as file:
            for path in paths:
                file.write(json.dumps([str(path), digest_of(path)]) + "\n")


Action: TypeAlias = Callable[[Scene], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """See the module docstring.

    point: its class, of `POINTS`. does: one sentence. as_torch: plain torch refuses it too, and its
    own words are as good. warning: what the log may say of what the compiled model leaves out, as a regular expression.
    culprits: ranks that the fault itself stops or ends; what becomes of them is not judged, but
    for a Wrong that they raise.
    joined: whether the processes are in a process group when `run` begins. then: what new processes do afterwards,
    which must be right.
    """

    name: str
    point: int
    does: str
    run: Action
    layout: str = "alone"
    right: bool = False
    words: tuple[str, ...] = ()
    as_torch: bool = False
    warning: str = ""
    culprits: frozenset[int] = frozenset()
    joined: bool = True
    seconds: float = SECONDS
    then: Action | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.right or self.words or self.culprits, f"{self.name}: no end of it is good"
        assert self.layout in LAYOUTS, self.layout

    @property
    def processes(self) -> int:
        """On how many it runs."""
        return LAYOUTS[self.layout][0]

    @property
    def kind(self) -> str:
        """The module in which it stands."""
        return self.name.partition("/")[0]

    @property
    def expected(self) -> str:
        """The good ends in words."""
        refused = f"refused, naming {', '.join(self.words)}" if self.words else ""
        return " or ".join(filter(None, ("right" if self.right else "", refused))) or "ends"

    def scene(self, rank: int, folder: Path) -> Scene:
        """Of one of its processes."""
        return Scene(rank=rank, processes=self.processes, dims=LAYOUTS[self.layout][1], folder=folder)


def fault(
    point: int, does: str, *, on: Sequence[str] = ("alone",), **expected: Any
) -> Callable[[Action], tuple[Fault, ...]]:
    """Make the function below a fault, one per layout of `on`. expected: fields of `Fault`."""

    def made(run: Action) -> tuple[Fault, ...]:
        return tuple(make_fault(point, run.__name__, does, run, layout=layout, **expected) for layout in on)

    return made


def make_fault(point: int, name: str, does: str, run: Action, *, layout: str = "alone", **expected: Any) -> Fault:
    """A fault named after the module of `run`. expected: fields of `Fault`."""
    module = getattr(run, "func", run).__module__.rpartition(".")[2]
    words = expected.pop("words", ())
    return Fault(
        name=f"{module}/{name.replace('_', '-')}/{layout}",
        point=point,
        does=does,
        run=run,
        layout=layout,
        words=(words,) if isinstance(words, str) else tuple(words),
        culprits=frozenset(expected.pop("culprits", ())),
        **expected,
    )


def faults_in(values: Mapping[str, Any]) -> Iterator[Fault]:
    """The faults of a module, from its names."""
    for value in values.values():
        if isinstance(value, tuple):
            yield from (entry for entry in value if isinstance(entry, Fault))


def protected_paths(folder: Path) -> dict[Path, str]:
    """What `Scene.protect` noted: path -> digest."""
    notes = folder / PROTECTED
    lines = notes.read_text().splitlines() if notes.exists() else []
    return {Path(path): digest for path, digest in map(json.loads, lines)}


def digest_of(path: Path) -> str:
    """Of the kind, target and content of a file, or of everything in a folder; "" where nothing is there."""
    if not path.is_symlink() and not path.exists():
        return ""
    mode = path.lstat().st_mode
    digest = hashlib.sha256(str(stat.S_IFMT(mode)).encode())
    if stat.S_ISLNK(mode):
        digest.update(str(path.readlink()).encode())
    elif stat.S_ISREG(mode):
        digest.update(path.read_bytes())
    elif stat.S_ISDIR(mode):
        for entry in sorted(path.iterdir()):
            digest.update(f"{entry.name} {digest_of(entry)}\n".encode())
    return digest.hexdigest()

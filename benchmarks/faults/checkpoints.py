"""Point 11: saves that end early, files that were damaged, checkpoints of other models, training that goes on.

Processes are killed from inside, at the n-th operation on files that Python reports, whatever is written and in which
order: first the operations of a save are counted, then a save over the old one ends at a share of them.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from benchmarks.faults.fault import Fault, Scene, Wrong, fault, make_fault
from benchmarks.faults.victims import Net, batch, compiled, expect_weights, sgd, train

FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.rmdir", "shutil.rmtree", "os.truncate")


def adam(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer whose state is saved."""
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(scene: Scene, seeds: range, **model: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A compiled model behind a step for every seed, and its optimizer."""
    module = compiled(scene, Net(**model), batch())
    optimizer = adam(module.parameters())
    train(module, optimizer, [batch(seed) for seed in seeds])
    return module, optimizer


def saved(scene: Scene, where: str = "step", steps: int = 2, **model: Any) -> Path:
    """A checkpoint behind some steps."""
    module, optimizer = trained(scene, range(steps), **model)
    autopar.save(scene.folder / where, module, optimizer)
    return scene.folder / where


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


class FileWatch:
    """Counts what this process does to files of a folder, and kills it at the n-th time."""

    def __init__(self, folder: Path) -> None:
        self.count, self.fatal = 0, -1
        self._folder = str(folder)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS or not any(self._folder in str(each) for each in arguments[:2]):
            return
        if event == "open" and not _writes(arguments):
            return
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _killed_over_an_old_one(share: float, victims: frozenset[int], scene: Scene) -> None:
    """Save; save elsewhere over another one, to count; then over the first one until the victims end."""
    watch = FileWatch(scene.folder)
    module, optimizer = trained(scene, range(2))
    autopar.save(scene.folder / "step", module, optimizer)
    train(module, optimizer, [batch(2), batch(3)])
    autopar.save(scene.folder / "other", module, optimizer)
    before = watch.count
    autopar.save(scene.folder / "other", module, optimizer)
    _together()
    operations = watch.count - before
    if scene.rank in victims:
        watch.fatal = watch.count + 1 + round(share * max(0, operations - 1))
    autopar.save(scene.folder / "step", module, optimizer)
    if scene.rank in victims:
        raise Wrong(f"the save was not cut: it made {operations} operations on files before, now fewer")


def _one_of_two(scene: Scene) -> None:
    """The checkpoint is the old or the new one, weights and optimizer."""
    module, optimizer = compiled(scene, Net(seed=9), batch()), None
    optimizer = adam(module.parameters())
    try:
        autopar.load(scene.folder / "step", module, optimizer)
    except autopar.AutoparError as error:
        raise Wrong(f"the old checkpoint is gone: {error}") from error
    train(module, optimizer, [batch(50)])
    wrong = []
    for steps in (2, 4):
        plain = Net()
        train(plain, adam(plain.parameters()), [batch(seed) for seed in (*range(steps), 50)])
        try:
            expect_weights(module, plain, 1e-4)
        except Wrong as error:
            wrong.append(str(error))
    if len(wrong) == 2:
        raise Wrong(f"it is neither the old nor the new checkpoint: {wrong[0]}; {wrong[1]}")


KILLED: tuple[Fault, ...] = tuple(
    make_fault(11, f"killed_at_{round(100 * share)}_percent{who}",
               f"{what} is killed behind {share:.0%} of the file operations of a save over an old checkpoint",
               partial(_killed_over_an_old_one, share, victims), layout=layout, culprits=victims, words=words,
               then=_one_of_two)
    for layout, who, what, victims, words in (
        ("alone", "", "the process", frozenset({0}), ()),
        ("shard2", "_rank_0", "rank 0", frozenset({0}), ("rank[s]? .*0",)),
        ("shard2", "_rank_1", "rank 1", frozenset({1}), ("rank[s]? .*1",)),
        ("shard2", "_all", "every rank", frozenset({0, 1}), ()),
    )
    for share in ((0.0, 0.25, 0.5, 0.75, 1.0) if layout == "alone" or who == "_all" else (0.0, 1.0))
)  # fmt: skip


def _files(folder: Path) -> list[Path]:
    """The files of a checkpoint, the largest of every suffix first."""
    return sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: (-p.stat().st_size, p.name))


def _kinds(folder: Path) -> list[Path]:
    """One file of every kind."""
    by_kind: dict[str, Path] = {}
    for path in _files(folder):
        by_kind.setdefault(path.suffix or path.name, path)
    return list(by_kind.values())


def _flip(place: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 0x10
        path.write_bytes(content)

    return flip


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _swap_halves(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[len(content) // 2 :] + content[: len(content) // 2])


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "flipped_in_front": ("a bit near its begin is flipped", _flip(0.05)),
    "flipped_in_the_middle": ("a bit in the middle is flipped", _flip(0.5)),
    "flipped_at_the_end": ("a bit near its end is flipped", _flip(0.9)),
    "cut_in_half": ("its second half is missing", _cut),
    "empty": ("it is empty", _empty),
    "deleted": ("it is gone", Path.unlink),
    "halves_swapped": ("its halves are swapped", _swap_halves),
}


def _damaged(damage: Callable[[Path], None], largest: bool, scene: Scene) -> None:
    """Load what was damaged, one file of a kind after the other. Right: the saved values; else refused, and nothing
    of the module has changed."""
    folder = saved(scene)
    _together()
    kinds = _kinds(folder)
    chosen = kinds[:1] if largest else kinds[1:]
    if not chosen:
        raise Wrong(f"there is one kind of file only: {kinds}")
    backup = scene.folder / "sound"
    if scene.rank == 0:
        shutil.copytree(folder, backup)
    _together()
    target = chosen[0]
    if scene.rank == 0:
        damage(target)
    _together()
    _load_or_nothing(scene, folder)


def _load_or_nothing(scene: Scene, folder: Path, **model: Any) -> None:
    """Load into a model with other weights; an error must leave them, and those of the optimizer, as they were."""
    module, optimizer = trained(scene, range(20, 21), seed=9, **model)
    before = _values(module, optimizer)
    try:
        autopar.load(folder, module, optimizer)
    except BaseException:
        _expect_same(before, _values(module, optimizer))
        raise
    expected, plain_optimizer = Net(), None
    plain_optimizer = adam(expected.parameters())
    train(expected, plain_optimizer, [batch(0), batch(1)])
    expect_weights(module, expected, 1e-4)
    train(module, optimizer, [batch(30)])
    train(expected, plain_optimizer, [batch(30)])
    expect_weights(module, expected, 1e-4)


def _values(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Blocks of this rank and the state of its optimizer; no process is asked."""
    found = {name: _local(value).clone() for name, value in module.named_parameters()}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{key} of {names[id(parameter)]}"] = _local(value).clone()
    return found


def _local(value: Any) -> torch.Tensor:
    found: torch.Tensor = (value.to_local() if hasattr(value, "to_local") else value).detach()
    return found


def _expect_same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    changed = [name for name in before if name not in after or not torch.equal(before[name], after[name])]
    if changed:
        raise Wrong(f"the load failed and has changed {len(changed)} of {len(before)} values, among them {changed[0]}")


DAMAGED: tuple[Fault, ...] = tuple(
    make_fault(11, f"{name}_{'values' if largest else 'index'}",
               f"of a checkpoint's file of {'values' if largest else 'the index'} {does}",
               partial(_damaged, damage, largest), layout=layout, right=True, words=("step|damaged",))
    for layout in ("alone", "shard2")
    for largest in (True, False)
    for name, (does, damage) in DAMAGES.items()
    if layout == "alone" or name in ("flipped_in_the_middle", "deleted", "cut_in_half")
)  # fmt: skip


@fault(11, "a checkpoint of three blocks is loaded into two", on=("alone", "shard2"), words=("blocks.2",))
def more_layers(scene: Scene) -> None:
    folder = saved(scene, layers=3)
    _load_or_nothing(scene, folder)


@fault(11, "a checkpoint of two blocks is loaded into three", on=("alone", "shard2"), words=("blocks.2",))
def fewer_layers(scene: Scene) -> None:
    folder = saved(scene)
    _load_or_nothing(scene, folder, layers=3)


class Wide(Net):
    """A wider head."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head = nn.Linear(8, 6)


@fault(11, "a checkpoint whose head has another shape is loaded", on=("alone", "shard4"), words=("head",))
def other_shape(scene: Scene) -> None:
    folder = saved(scene)
    module = compiled(scene, Wide(), batch())
    optimizer = adam(module.parameters())
    before = _values(module, optimizer)
    try:
        autopar.load(folder, module, optimizer)
    except BaseException:
        _expect_same(before, _values(module, optimizer))
        raise


@fault(11, "a checkpoint in fp64 is loaded into fp32", right=True, words=("float",))
def other_dtype(scene: Scene) -> None:
    inputs = batch()
    module = compiled(scene, Net().double(), {**inputs, "x": inputs["x"].double()})
    autopar.save(scene.folder / "step", module)
    other = compiled(scene, Net(seed=4), batch())
    autopar.load(scene.folder / "step", other)
    expect_weights(other, Net())


@fault(11, "the state of AdamW is loaded into SGD with momentum", words=("momentum|optimizer",))
def other_optimizer(scene: Scene) -> None:
    folder = saved(scene)
    module = compiled(scene, Net(), batch())
    optimizer = sgd(module.parameters())
    train(module, optimizer, [batch()])
    autopar.load(folder, module, optimizer)


@fault(11, "a checkpoint without an optimizer is loaded with one", words=("optimizer",))
def no_optimizer_saved(scene: Scene) -> None:
    module, optimizer = trained(scene, range(1))
    autopar.save(scene.folder / "step", module)
    autopar.load(scene.folder / "step", module, optimizer)


@fault(11, "a folder that is not there is loaded", on=("alone", "dp2"), words=("nowhere",))
def missing_folder(scene: Scene) -> None:
    module, optimizer = trained(scene, range(1))
    autopar.load(scene.folder / "nowhere", module, optimizer)


@fault(11, "an empty folder is loaded", words=("empty",))
def empty_folder(scene: Scene) -> None:
    (scene.folder / "empty").mkdir()
    module, optimizer = trained(scene, range(1))
    autopar.load(scene.folder / "empty", module, optimizer)


@fault(11, "a file is loaded instead of a folder", words=("notes.txt",))
def file_instead(scene: Scene) -> None:
    (scene.folder / "notes.txt").write_text("hello")
    module, optimizer = trained(scene, range(1))
    autopar.load(scene.folder / "notes.txt", module, optimizer)


@fault(11, "rank 1 looks into another folder", on=("shard2",), words=("rank[s]? .*1|nowhere",))
def other_folder_on_one(scene: Scene) -> None:
    saved(scene)
    module, optimizer = trained(scene, range(1))
    autopar.load(scene.folder / ("nowhere" if scene.rank == 1 else "step"), module, optimizer)


@fault(11, "a save goes where a file is", on=("alone", "dp2"), words=("step",))
def save_onto_a_file(scene: Scene) -> None:
    if scene.rank == 0:
        (scene.folder / "step").write_text("notes")
        scene.protect(scene.folder / "step")
    module, optimizer = trained(scene, range(1))
    autopar.save(scene.folder / "step", module, optimizer)


@fault(11, "a save goes into a file system that cannot be written", on=("alone", "dp2"), words=("/proc/autopar",))
def save_into_proc(scene: Scene) -> None:
    module, optimizer = trained(scene, range(1))
    autopar.save("/proc/autopar/step", module, optimizer)


@fault(11, "the disk is full while a save goes over an old checkpoint", on=("alone", "shard2"),
       words=("step|space|large",), then=_one_of_two)  # fmt: skip
def full_disk(scene: Scene) -> None:
    module, optimizer = trained(scene, range(2))
    autopar.save(scene.folder / "step", module, optimizer)
    if scene.rank == 0:
        scene.protect(scene.folder / "step")
    train(module, optimizer, [batch(2), batch(3)])
    _together()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    try:
        autopar.save(scene.folder / "step", module, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

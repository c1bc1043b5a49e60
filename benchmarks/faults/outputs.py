"""Point 15: paths to which nothing can or should be written.

Whatever is there, and whatever lies beside it, must be there afterwards as it was; an error is one clear line.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import autopar
from benchmarks.faults.fault import Fault, Scene, fault, make_fault
from benchmarks.faults.victims import MODEL, ON, Net, batch, command, compiled, sgd, sound_plan, train

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "plan": ("plan", MODEL, *ON, "-o", "{}"),
    "report": ("report", "plan.json", "-o", "{}"),
    "export": ("export", "plan.json", "--to", "torchtitan", "-o", "{}"),
    "edit": ("edit", "plan.json", "--trust", "--set", "head.weight=R", "-o", "{}"),
    "simulate": ("simulate", "plan.json", "--trust", "--trace", "{}"),
    "what-if": ("what-if", "plan.json", "--trust", "--memory-limit", "1GB", "-o", "{}"),
}


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


def _device(path: Path) -> None:
    """A node like /dev/null, where this user may make one; else a link to it."""
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        path.symlink_to("/dev/null")


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("notes")


def _link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _link_into_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere") / "file")


NODES: Mapping[str, Callable[[Path], None]] = {
    "a device": _device,
    "a pipe": _fifo,
    "a socket": _socket,
    "a folder": _folder,
    "a link to a pipe": _link_to_a_fifo,
    "a link to itself": _link_to_itself,
    "a link into a folder that is not there": _link_into_nothing,
}


def _onto(make: Callable[[Path], None], words: tuple[str, ...], scene: Scene) -> None:
    outside = scene.folder / "out"
    outside.mkdir()
    target = outside / "file.json"
    make(target)
    scene.protect(outside)
    _run(words, target, scene)


def _run(words: tuple[str, ...], target: Path, scene: Scene) -> None:
    (scene.folder / "plan.json").write_bytes(sound_plan())
    command(*(word.format(target) for word in words))


ONTO_NODES: tuple[Fault, ...] = tuple(
    make_fault(15, f"{name} onto {what}".replace(" ", "_"), f"the output of autopar {name} is {what}",
               partial(_onto, make, COMMANDS[name]), words=("file.json|nowhere",))
    for name in COMMANDS
    for what, make in NODES.items()
    if name in ("plan", "export") or what in ("a device", "a folder")
)  # fmt: skip


def _elsewhere(target: str, words: tuple[str, ...], scene: Scene) -> None:
    (scene.folder / "notes.txt").write_text("notes")
    scene.protect(scene.folder / "notes.txt")
    _run(words, Path(target), scene)


PLACES: Mapping[str, tuple[str, str]] = {
    "a folder that is not there": ("nowhere/file.json", "nowhere"),
    "a folder that is a file": ("notes.txt/file.json", "notes.txt"),
    "a file system that cannot be written": ("/proc/autopar.json", "/proc"),
    "the folder of processes": ("/proc/self/nothing/file.json", "/proc"),
    "an empty name": ("", "output|file|-o"),
    "a name that is too long": ("x" * 300 + ".json", "xxx|long"),
}

INTO_PLACES: tuple[Fault, ...] = tuple(
    make_fault(15, f"{name} into {what}".replace(" ", "_"), f"the output of autopar {name} lies in {what}",
               partial(_elsewhere, target, COMMANDS[name]), words=(word,))
    for name in ("plan", "report")
    for what, (target, word) in PLACES.items()
)  # fmt: skip


def _full(words: tuple[str, ...], exists: bool, scene: Scene) -> None:
    """A disk that takes 50 bytes of any file."""
    (scene.folder / "plan.json").write_bytes(sound_plan())
    outside = scene.folder / "out"
    outside.mkdir()
    if exists:
        (outside / "file.json").write_text("what was there")
    scene.protect(outside)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
    try:
        command(*(word.format(outside / "file.json") for word in words))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


FULL: tuple[Fault, ...] = tuple(
    make_fault(15, f"{name} on a full disk{' over an old file' if exists else ''}".replace(" ", "_"),
               f"the disk is full while autopar {name} writes{' over an old file' if exists else ''}",
               partial(_full, COMMANDS[name], exists), words=("file.json",))
    for name in COMMANDS
    for exists in (False, True)
    if not exists or name in ("plan", "simulate", "report")
)  # fmt: skip


@fault(15, "the output is a link to a file: the file is written, the link stays", right=True)
def link_to_a_file(scene: Scene) -> None:
    target = scene.folder / "real.json"
    target.write_text("old")
    link = scene.folder / "link.json"
    link.symlink_to(target)
    scene.protect(link)
    _run(COMMANDS["plan"], link, scene)
    json.loads(target.read_text())


@fault(15, "Plan.save goes onto a pipe", words=("pipe",))
def plan_save(scene: Scene) -> None:
    os.mkfifo(scene.folder / "pipe")
    scene.protect(scene.folder / "pipe")
    autopar.Plan.from_json(sound_plan()).save(scene.folder / "pipe")


@fault(15, "Cluster.save goes onto a device", words=("file.json",))
def cluster_save(scene: Scene) -> None:
    _device(scene.folder / "file.json")
    scene.protect(scene.folder / "file.json")
    autopar.Cluster.parse("2x8 H100-SXM").save(scene.folder / "file.json")


@fault(15, "StepLog goes into a folder that is not there", words=("nowhere",))
def step_log(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    with autopar.StepLog(scene.folder / "nowhere" / "run.jsonl", module.plan) as log, log.step():
        train(module, sgd(module.parameters()), [batch()])


@fault(15, "StepLog goes onto a folder", words=("folder",))
def step_log_onto_a_folder(scene: Scene) -> None:
    (scene.folder / "folder").mkdir()
    module = compiled(scene, Net(), batch())
    with autopar.StepLog(scene.folder / "folder", module.plan) as log, log.step():
        train(module, sgd(module.parameters()), [batch()])


@fault(15, "cache_dir is a file", words=("notes.txt",))
def cache_is_a_file(scene: Scene) -> None:
    (scene.folder / "notes.txt").write_text("notes")
    scene.protect(scene.folder / "notes.txt")
    compiled(scene, Net(), batch(), cache_dir=scene.folder / "notes.txt")


@fault(15, "a plan in cache_dir is damaged: it is made anew, or refused", right=True, words=("cache|damaged",))
def damaged_cache(scene: Scene) -> None:
    for _ in range(2):
        compiled(scene, Net(), batch(), cache_dir=scene.folder / "kept")
        for path in (scene.folder / "kept").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:100])


@fault(15, "AUTOPAR_CACHE is a file", right=True, words=("cache",), environment={"AUTOPAR_CACHE": "/proc/version"})
def cache_variable(scene: Scene) -> None:
    compiled(scene, Net(), batch())
    command("cache")

"""Faults that were planted: each ends in another way on real processes."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch.distributed as dist

from autopar.errors import RankMismatchError
from benchmarks.faults.fault import Scene, Wrong, fault


@fault(1, "nothing is wrong", on=("dp2",), right=True)
def sound(scene: Scene) -> None:
    dist.barrier()


@fault(1, "every rank says so", on=("dp2",), words=("rank 1",))
def told(scene: Scene) -> None:
    raise RankMismatchError(f"rank 1 differs, says rank {scene.rank}")


@fault(1, "rank 1 computes something else", on=("dp2",), right=True)
def wrong_on_one(scene: Scene) -> None:
    if scene.rank == 1:
        raise Wrong("the loss is 8 % off")


@fault(1, "rank 1 waits for nobody", on=("dp2",), right=True, seconds=1.5)
def waiting(scene: Scene) -> None:
    if scene.rank == 1:
        time.sleep(60.0)


@fault(1, "rank 1 does not end though its work is done", on=("dp2",), right=True, seconds=1.5)
def not_ending(scene: Scene) -> None:
    if scene.rank == 1:
        threading.Thread(target=time.sleep, args=(60.0,)).start()


@fault(1, "rank 0 raises what is not ours", on=("dp2",), words=("rank",))
def foreign(scene: Scene) -> None:
    if scene.rank == 0:
        raise KeyError("x")
    raise RankMismatchError("rank 0 failed")


@fault(1, "rank 1 dies unasked", on=("dp2",), right=True)
def dying(scene: Scene) -> None:
    if scene.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@fault(1, "rank 1 is stopped, rank 0 tells", on=("dp2",), words=("rank 1",), culprits={1}, seconds=5.0)
def stopped(scene: Scene) -> None:
    if scene.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    raise RankMismatchError("rank 1 is gone")


@fault(1, "the error is right and the file is gone", words=("notes",))
def losing(scene: Scene) -> None:
    notes = scene.folder / "notes"
    notes.write_text("kept")
    scene.protect(notes)
    notes.unlink()
    raise RankMismatchError("cannot write notes")


def _look(scene: Scene) -> None:
    if (scene.folder / "state").read_text() != "whole":
        raise Wrong("half of the state is there")


@fault(1, "what is left behind is looked at by a new process", culprits={0}, then=_look)
def left_behind(scene: Scene) -> None:
    (scene.folder / "state").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

"""Jobs of the workers whose checkpoints are written by processes beside them."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from tests.distributed.captured_once import compile_once, prepared_by
from tests.distributed.checkpoint_jobs import Loader, _bits, _heard, _step
from tests.distributed.models import captured_tied, tied_model, tokens


def _run(seed: int, dims: dict[str, int]) -> tuple[autopar.ParallelModule, Any, Any]:
    torch.manual_seed(seed)
    module = compile_once("tied model", tied_model(seed=seed, dropout=0.2), tokens(0), dims=dims)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    return module, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)


def _captured(**_: Any) -> bool:
    return captured_tied(dropout=0.2)


@prepared_by(_captured)
def goes_on(path: str) -> dict[str, Any]:
    """Train with a checkpointer, go on from its last checkpoint in another run, and compare with what the first one was
    at that step and did behind it."""
    module, optimizer, scheduler = _run(11, {"dp_shard": 2})
    loader = Loader(module.data_shard()[0])
    extra = {"scheduler": scheduler, "loader": autopar.PerDataRank(loader)}
    began, then = [], None
    with autopar.Checkpointer(path, module, optimizer, every=2, keep=2, extra=extra) as saver:
        resumed_nothing = saver.resume()
        for step in range(6):
            _step(module, optimizer, step)
            scheduler.step()
            loader.state["position"] = 10 * step + dist.get_rank()
            began.append(saver.step())
            if step == 5:
                then = _bits(module, optimizer)
            saver.wait()
        drawn = torch.rand(1).item(), random.random()
        behind = _step(module, optimizer, 6)
    other, again, schedule = _run(5, {"dp_shard": 2})
    fresh = Loader(-1)
    extra = {"scheduler": schedule, "loader": autopar.PerDataRank(fresh)}
    with autopar.Checkpointer(path, other, again, every="10min", extra=extra) as saver:
        loaded = saver.resume()
        assert loaded is not None
        same = _bits(other, again) == then
        same_draws = (torch.rand(1).item(), random.random()) == drawn
        same_loss = _step(other, again, 6) == behind
        steps = saver.steps
    plan = autopar.Checkpointer.latest_plan(path)
    return {
        "nothing at first": resumed_nothing is None,
        "began": began,
        "folders": sorted(each.name for each in Path(path).iterdir()),
        "same": [same, same_draws, same_loss, plan == module.plan, schedule.last_epoch == 6],
        "loader": fresh.state,
        "steps": (loaded.step, steps),
        "left in memory": [each.name for each in Path("/dev/shm").glob("autopar-staged-*") if _is_mine(each)],
    }


def _is_mine(path: Path) -> bool:
    return path.stat().st_uid == os.getuid() and time.time() - path.stat().st_mtime < 5.0


@prepared_by(_captured)
def outlives_its_writer(path: str) -> dict[str, Any]:
    """Writers are asked to end, and go on; that of rank 1 is killed in a save: what is heard, what is left, and whether
    the next save is whole."""
    module, optimizer, _ = _run(11, {"tp": 2})
    with autopar.Checkpointer(path, module, optimizer, every=1) as saver:
        _step(module, optimizer, 0)
        saver.step()
        saver.wait()
        writer = saver._writer.pid
        for asked in (signal.SIGINT, signal.SIGTERM):
            os.kill(writer, asked)
        _step(module, optimizer, 1)
        saver.step()
        saver.wait()
        if dist.get_rank() == 1:
            os.kill(writer, signal.SIGSTOP)
        _step(module, optimizer, 2)
        saver.step()
        staged = [name.name for name in Path("/dev/shm").glob("autopar-staged-*") if _is_mine(name)]
        if dist.get_rank() == 1:
            os.kill(writer, signal.SIGKILL)
        heard = _heard(saver.wait)
        left = autopar.load(path, module).step
        _step(module, optimizer, 3)
        saver.save()
    return {"heard": heard, "left": left, "then": autopar.load(path, module).step, "named in memory": staged}


@prepared_by(_captured)
def killed_in_a_save(path: str) -> None:
    """Save step 1 whole, and end all ranks without a word while step 2 is being written."""
    module, optimizer, _ = _run(11, {"tp": 2})
    saver = autopar.Checkpointer(path, module, optimizer, every=1)
    _step(module, optimizer, 0)
    saver.step()
    saver.wait()
    if dist.get_rank() == 1:
        os.kill(saver._writer.pid, signal.SIGSTOP)  # what it is to write is never written
    _step(module, optimizer, 1)
    saver.step()
    Path(f"{path}-writers-{dist.get_rank()}").write_text(str(saver._writer.pid))
    dist.barrier()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@prepared_by(_captured)
def resumed(path: str) -> int:
    """The step at which another run goes on."""
    module, optimizer, _ = _run(5, {"dp_shard": 2})
    with autopar.Checkpointer(path, module, optimizer, every=1) as saver:
        loaded = saver.resume()
        assert loaded is not None
        return loaded.step


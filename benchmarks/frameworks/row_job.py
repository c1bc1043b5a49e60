"""The job of one process of a row, for a `Pool`: "benchmarks.frameworks.row_job:run_row"."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from benchmarks.frameworks.framework_row import FrameworkRow, Run, Stand

NEEDS = MappingProxyType(
    {
        "accelerate": ("accelerate_rows", ("accelerate",)),
        "trainer": ("trainer_rows", ("accelerate",)),
        "lightning": ("lightning_rows", ("lightning",)),
        "fabric": ("fabric_rows", ("lightning",)),
        "peft": ("peft_rows", ("peft", "accelerate")),
        "precision": ("precision_rows", ()),
        "optimizers": ("optimizer_rows", ()),
        "torchao": ("torchao_rows", ("torchao",)),
    }
)
"""Framework -> the module of its rows, and the packages without which they do not run."""


def rows_of(framework: str) -> tuple[FrameworkRow, ...]:
    """The rows of one framework; none where its package is not installed."""
    module, packages = NEEDS[framework]
    if not all(find_spec(package) for package in packages):
        return ()
    found: tuple[FrameworkRow, ...] = import_module(f"benchmarks.frameworks.{module}").ROWS
    return found


def run_row(name: str, ours: bool, folder: str) -> Run:
    """The run of this rank of the row `name`, with autopar or without."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    if processes > 1:
        _as_torchrun(rank, processes)
    logging.disable(logging.WARNING)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loaders start workers
    with contextlib.ExitStack() as quiet:  # frameworks print every step
        nowhere = quiet.enter_context(Path(os.devnull).open("w"))
        quiet.enter_context(contextlib.redirect_stdout(nowhere))
        quiet.enter_context(contextlib.redirect_stderr(nowhere))
        quiet.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        row = next(each for each in rows_of(name.partition("/")[0]) if each.name == name)
        return row.loop(Stand(ours=ours, rank=rank, processes=processes, folder=Path(folder)))


def _as_torchrun(rank: int, processes: int) -> None:
    """What frameworks read of their launcher."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "row"})

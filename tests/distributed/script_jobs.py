"""A job that is a script of examples/, started in a worker of the pool as `python` or torchrun would start it."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar import api
from tests.distributed.captured_once import SharedCaptures

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run_script(name: str, arguments: list[str], folder: str, port: int) -> str:
    """What this rank prints, with the fault that ended it, in a working folder of all. port: where they meet."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # the script joins the job by itself
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setattr(api, "Captures", SharedCaptures)
        for variable, value in _variables(rank, processes, port).items():
            patch.setenv(variable, value)
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except RuntimeError as fault:
            print(f"ended by: {fault}")
            if "a fault" not in str(fault):
                raise
    return printed.getvalue()


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    """Those of torchrun; none for a script that is started by itself."""
    if processes == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": os.path.basename(os.getcwd())}
    return {**{name: str(number) for name, number in numbers.items()}, **place}

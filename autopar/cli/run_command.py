"""`autopar run`: torchrun, with a plan for the script's `autopar.compile`.

    autopar run --plan plan.json -- train.py --lr 1e-3
    autopar run --nproc-per-node 4 -- train.py                     # the script plans by itself

On several nodes the options of torchrun stand before the dashes: `autopar run --plan p.json --torchrun "--nnodes 2
--rdzv-backend c10d --rdzv-endpoint head:29400" -- train.py`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click

from autopar.errors import ConfigurationError
from autopar.plans.parallel_plan import PLAN_VARIABLE, Plan


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--plan", "path", type=click.Path(dir_okay=False, path_type=Path), help="The plan that is run.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), help="Default: all ranks of the plan.")
@click.option("--torchrun", "more", default="", help="More options of torchrun, in one text.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED)
def run(path: Path | None, nproc_per_node: int | None, more: str, script: tuple[str, ...]) -> None:
    """Run the training SCRIPT with its arguments under torchrun; autopar.compile takes the plan.

    Example: autopar run --plan plan.json -- train.py --steps 10
    """
    if not Path(script[0]).is_file():
        raise ConfigurationError(f"there is no script {script[0]}: write the path of a Python file behind --")
    environment = dict(os.environ)
    if path is not None:
        nproc_per_node = nproc_per_node or Plan.load(path).num_ranks
        environment[PLAN_VARIABLE] = str(path.resolve())
    if nproc_per_node is None:
        raise ConfigurationError("how many processes? give --plan, or --nproc-per-node")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc_per_node}"]
    done = subprocess.run([*command, *shlex.split(more), *script], env=environment, check=False)
    sys.exit(done.returncode)

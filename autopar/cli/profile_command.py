"""`autopar profile`: measure this machine, so that plans for it are priced by what it really does.

autopar profile                      # GPU kernels where there is a GPU, else operators and collectives of the CPU
torchrun ... -m autopar profile      # on all nodes of a job: the links between them too
autopar profile -o h100.json         # also write the profile to carry elsewhere: autopar plan ... --profile h100.json
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click
import msgspec
import torch
from rich.console import Console

from autopar.cli.options import OUTPUT_FILE
from autopar.cli.output import as_json_option
from autopar.files import write_atomically
from autopar.hardware.operator_profile import OperatorProfile, load_profile, operator_profile_path, save_profile
from autopar.report.progress_bars import with_progress
from autopar.report.terminal_tables import table
from autopar.runtime.calibration.measure_host import cuda_seconds, measure_host
from autopar.runtime.calibration.measure_job import calibrate_job, in_job, job_tables
from autopar.runtime.calibration.measure_machine import calibrate, host_table, tables
from autopar.runtime.calibration.profile_kernels import profile_of_gpu


@click.command()
@click.option("--force", is_flag=True, help="Measure again even if this machine was measured.")
@click.option("-o", "--output", type=OUTPUT_FILE, help="Where a copy is written.")
@as_json_option
def profile(force: bool, output: Path | None, as_json: bool) -> None:
    """Measure operators, collectives and memory rates of this machine (two minutes on CPUs, five on a GPU).

    Example: autopar profile --force -o profile.json
    """
    console = Console(stderr=True)
    if torch.cuda.is_available():
        content = msgspec.json.encode(_gpu(console, force), order="deterministic")
    elif in_job():
        console.quiet = int(os.environ["RANK"]) != 0
        job = with_progress(console, "the job's links", lambda step: calibrate_job(force=force, on_progress=step))
        if console.quiet:
            return
        console.print(*job_tables(job))
        content = msgspec.json.encode(job, order="deterministic")
    else:
        found = with_progress(
            console, "operators and collectives", lambda step: calibrate(force=force, on_progress=step)
        )
        console.print(*tables(found))
        content = msgspec.json.encode(found, order="deterministic")
    if output is not None:
        write_atomically(output, msgspec.json.format(content, indent=1))
    if as_json:
        click.echo(content.decode())


def _gpu(console: Console, force: bool) -> OperatorProfile:
    path = operator_profile_path(torch.cuda.get_device_properties().name)
    if path.exists() and not force:
        found = load_profile(path)
    else:
        found = with_progress(console, "kernels", profile_of_gpu)
        found = replace(found, host=measure_host(cuda_seconds, "pinned copies"))
        save_profile(found, path)
    counts = Counter((kernel.kind, kernel.dtype) for kernel in found.kernels)
    rows = [(kind, dtype, str(count)) for (kind, dtype), count in sorted(counts.items())]
    console.print(table(f"{found.device}, {found.date}", ("kernel", "dtype", "sizes"), rows))
    if found.host is not None:
        console.print(host_table(found.host))
    return found

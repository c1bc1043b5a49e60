"""Launchers: torchrun, mpirun and srun say in variables which process of a job this is, and `compile` joins the job.

    torchrun --nproc-per-node 4 train.py     RANK=2 WORLD_SIZE=4 LOCAL_RANK=2     ->  init_process_group as rank 2 of 4
    python train.py                          none of them                         ->  one process, no process group

A script that has called `init_process_group` itself is left alone. Backend: nccl where CUDA devices are there, each
process on the one of its local rank; else gloo.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.errors import ConfigurationError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Names of the variables in which a launcher says rank, number of processes and rank on the node.

    job: what tells jobs apart that run at once; hosts: the list of nodes, rank 0's first (no variable: "")."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    job: str = ""
    hosts: str = ""


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        name="torchrun",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        job="TORCHELASTIC_RUN_ID",
    ),
    Launcher(
        name="mpirun of Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
    ),
    Launcher(
        name="mpirun of MPICH or Intel MPI",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
    Launcher(
        name="srun",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",  # a batch script has SLURM_NTASKS and a rank too, but is alone
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        job="SLURM_JOB_ID",
        hosts="SLURM_STEP_NODELIST",
    ),
)
"""The first of them whose rank and size are set counts: torchrun under srun starts processes of its own."""

PORTS = range(20_000, 30_000)
"""From which the port of a job is taken, by its name, where no MASTER_PORT is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A process of a job: its rank among world_size, and on its node. address: "host:port" of rank 0's store."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    address: str


def launched_process(environment: Mapping[str, str]) -> Launched | None:
    """What the variables say of this process; None where no launcher started it. Raises ConfigurationError for numbers
    that cannot be, and where rank 0 cannot be found."""
    for launcher in LAUNCHERS:
        if environment.get(launcher.rank) and environment.get(launcher.world_size):
            rank, size = (_number(environment, name) for name in (launcher.rank, launcher.world_size))
            if not 0 <= rank < size:
                raise ConfigurationError(
                    f"{launcher.rank}={rank} and {launcher.world_size}={size} (from {launcher.name}): ranks are 0 to "
                    f"{size - 1}; unset both where this process is alone"
                )
            local = _number(environment, launcher.local_rank) if environment.get(launcher.local_rank) else rank
            return Launched(
                launcher=launcher.name,
                rank=rank,
                world_size=size,
                local_rank=local,
                address="" if size == 1 else _address(environment, launcher, size),
            )
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigurationError(f"{name}={environment[name]!r} is no number: unset it, or use a launcher") from None


def _address(environment: Mapping[str, str], launcher: Launcher, size: int) -> str:
    host = environment.get("MASTER_ADDR") or _first_host(environment.get(launcher.hosts, ""))
    if not host and environment.get(launcher.local_size) == str(size):
        host = "127.0.0.1"
    if not host:
        raise ConfigurationError(
            f"{launcher.name} started {size} processes, and no variable says where rank 0 is: set MASTER_ADDR (its "
            "host) and MASTER_PORT for all of them, or call torch.distributed.init_process_group before autopar.compile"
        )
    port = environment.get("MASTER_PORT") or _port(environment.get(launcher.job, ""))
    return f"{host}:{port}"


def _first_host(hosts: str) -> str:
    """The first of a list as Slurm writes it: gpu[003-007,12],login -> gpu003."""
    first = re.match(r"([^,\[]*)(?:\[([^],-]*)[^]]*\])?", hosts)
    return "" if first is None else first[1] + (first[2] or "")


def _port(job: str) -> int:
    """The same for all processes of a job, and probably another for the next one."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def join_launched_job() -> None:
    """Initialise the default process group where a launcher started several processes and nobody did so yet.

    Raises ConfigurationError where its variables contradict themselves or rank 0 cannot be reached.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    launched = launched_process(os.environ)
    if launched is None or launched.world_size == 1:
        return
    on_cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if on_cuda:
        _take_device(launched.local_rank)
    log.info(f"rank {launched.rank} of {launched.world_size}, as {launched.launcher} says")
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            init_method=f"tcp://{launched.address}" if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ else "env://",
            rank=launched.rank,
            world_size=launched.world_size,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"rank {launched.rank} of {launched.world_size} (from {launched.launcher}) did not reach the others at "
            f"{launched.address}: {error}"
        ) from error
    atexit.register(_leave)


def _take_device(local_rank: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise ConfigurationError(
            f"this is process {local_rank} of its node, which has {torch.cuda.device_count()} CUDA devices: start as "
            "many processes as there are devices"
        )
    torch.cuda.set_device(local_rank)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

"""Launchers: torchrun, mpirun and srun say in variables which process of a job this is, and `compile` joins the job.

    torchrun --nproc-per-node 4 train.py     RANK=2 WORLD_SIZE=4 LOCAL_RANK=2     ->  init_process_group as rank 2 of 4
    python train.py                          none of them                         ->  one process, no process group

A script that has called `init_process_group` itself is left alone. Backend: nccl where CUDA devices are there, each
process on the one of its local rank; else gloo.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from autopar._compat import PrefixStore, Store
from autopar.errors import AutoparError, ConfigurationError, RankLostError

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

USUAL_SECONDS = 20.0
"""After which the log says who is missing at the begin of a job: nodes boot and import at their own pace."""
SHOWN = 8
"""Ranks that a message names."""
_JOINS = itertools.count()
"""Of this process: each has keys of its own in the store, which may outlive a process group."""
_PRESENT, _COUNT, _SIZE, _REFUSED = "rank/", "count", "size", "refused"

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


def join_launched_job(seconds: float) -> None:
    """Initialise the default process group where a launcher started several processes and nobody did so yet.

    seconds: to wait for the others; 0: as long as torch does. Raises ConfigurationError where its variables contradict
    themselves, or those of another process, or rank 0 cannot be reached, and RankLostError naming ranks that do not
    come.
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
        store = met_store(launched, os.environ, seconds or default_pg_timeout.total_seconds(), next(_JOINS))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=store,
            rank=launched.rank,
            world_size=launched.world_size,
            device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        if isinstance(error, AutoparError):
            raise
        raise ConfigurationError(
            f"rank {launched.rank} of {launched.world_size} (from {launched.launcher}) did not reach the others at "
            f"{launched.address}: {error}"
        ) from error
    atexit.register(_leave)


def met_store(launched: Launched, environment: Mapping[str, str], seconds: float, number: int = 0) -> Store:
    """The store of the job, where all its processes have said who they are: made by rank 0, or by torchrun. number: of
    the join, where they left a process group and form another one.

    Raises ConfigurationError where two are one rank, or were told other numbers of processes, and RankLostError with
    the ranks that did not come within `seconds`.
    """
    host, _, port = launched.address.rpartition(":")
    of_torchrun = "TORCHELASTIC_USE_AGENT_STORE" in environment
    limit = timedelta(seconds=seconds)
    tcp = dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=launched.rank == 0 and not of_torchrun, timeout=limit, wait_for_workers=False,
        multi_tenant=True,
    )  # fmt: skip
    store = PrefixStore(f"autopar/job/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}", tcp)
    _announce(store, launched)
    _await_others(store, launched, seconds)
    tcp.set_timeout(default_pg_timeout)
    return store


def _announce(store: Store, launched: Launched) -> None:
    """Say that this rank is there. Raises ConfigurationError, and lets the others do so, where that cannot be."""
    size = store.compare_set(_SIZE, "", str(launched.world_size)).decode()
    if size != str(launched.world_size):
        _refuse(
            store,
            f"rank {launched.rank} was told that there are {launched.world_size} processes (WORLD_SIZE or its like), "
            f"another one that there are {size}",
        )
    if store.add(f"{_PRESENT}{launched.rank}", 1) > 1:
        _refuse(store, f"two processes were told that they are rank {launched.rank} of {launched.world_size}")
    store.add(_COUNT, 1)


def _refuse(store: Store, why: str) -> NoReturn:
    message = f"{why}: let one launcher start all processes of a job, at an address (MASTER_PORT) of its own"
    store.set(_REFUSED, message)
    raise ConfigurationError(message)


def _await_others(store: Store, launched: Launched, seconds: float) -> None:
    """Raises ConfigurationError where one of them refused, RankLostError where one does not come."""
    begin, told = time.monotonic(), USUAL_SECONDS
    while True:
        if store.check([_REFUSED]):
            raise ConfigurationError(store.get(_REFUSED).decode())
        if store.add(_COUNT, 0) >= launched.world_size:
            return
        waited = time.monotonic() - begin
        if waited > seconds:
            raise RankLostError(
                f"ranks {_missing(store, launched)} did not join the job at {launched.address} within {seconds:.0f} s: "
                "what stopped them stands in their own output; a larger AUTOPAR_HEARTBEAT waits longer"
            )
        if waited > told:
            told *= 2.0
            log.warning(f"waiting for ranks {_missing(store, launched)} to join, for {waited:.0f} s")
        time.sleep(min(0.02 + waited / 20, 1.0))


def _missing(store: Store, launched: Launched) -> str:
    ranks = [rank for rank in range(launched.world_size) if not store.check([f"{_PRESENT}{rank}"])]
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"{', '.join(map(str, ranks[:SHOWN]))}{more} of {launched.world_size}"


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

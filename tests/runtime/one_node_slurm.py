"""Slurm on this machine alone, as `srun` meets it: two daemons of one user, without passwords, in a folder."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd")
_PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
_SECONDS = 30.0
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """The programs of Slurm that this machine lacks, "" where none."""
    return ", ".join(name for name in ("srun", "sinfo", *DAEMONS) if shutil.which(name, path=_PLACES) is None)


@contextmanager
def one_node_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which `srun` finds the daemons, which run until the end of the block."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    configuration = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    configuration.write_text(
        CONFIGURATION.format(host=host, user=getpass.getuser(), ports=_free_ports(), folder=folder).lstrip()
    )
    variables = {"SLURM_CONF": str(configuration)}
    daemons = [
        subprocess.Popen(
            [str(shutil.which(name, path=_PLACES)), "-D"],
            env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for name in DAEMONS
    ]  # fmt: skip
    try:
        _await_node(variables)
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()


def _free_ports() -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _await_node(variables: dict[str, str]) -> None:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        told = subprocess.run(
            ["sinfo", "--noheader", "--format=%t"],
            env={**os.environ, **variables}, text=True, capture_output=True, check=False,
        )  # fmt: skip
        if told.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise TimeoutError(f"Slurm has no idle node after {_SECONDS:.0f} s: {told.stdout}{told.stderr}")

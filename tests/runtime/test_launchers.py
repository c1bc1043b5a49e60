"""Launchers: what their variables say, and the README's example under each, which is one job and not several."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError, ConfigurationError, RankLostError
from autopar.runtime.launchers import Launched, launched_process, met_store
from tests.runtime import one_node_slurm
from tests.test_quickstart import ROOT, readme_example

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "29400"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "12",
}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3", "SLURM_JOB_ID": "77"}


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        (TORCHRUN, ("torchrun", 2, 4, 0, "head:29400")),
        (OPEN_MPI, ("mpirun of Open MPI", 1, 2, 1, "127.0.0.1:")),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("mpirun of MPICH or Intel MPI", 0, 1, 0, "")),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[007-008,12],x"}, ("srun", 3, 8, 3, "gpu007:")),
        ({**SRUN, "SLURM_STEP_NODELIST": "a,b", "MASTER_ADDR": "c", "MASTER_PORT": "9"}, ("srun", 3, 8, 3, "c:9")),
        ({**SRUN, **TORCHRUN}, ("torchrun", 2, 4, 0, "head:29400")),
    ],
)
def test_variables_say_which_process_this_is(
    variables: dict[str, str], wanted: tuple[str, int, int, int, str]
) -> None:
    found = launched_process(variables)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == wanted[:4]
    assert found.address.startswith(wanted[4])
    assert bool(found.address) == bool(wanted[4])


@pytest.mark.parametrize("variables", [{}, {"RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}])
def test_a_process_that_nobody_launched_is_alone(variables: dict[str, str]) -> None:
    assert launched_process(variables) is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**TORCHRUN, "RANK": "4"}, "ranks are 0 to 3"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE='four' is no number"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set MASTER_ADDR"),
        (SRUN, "srun started 8 processes, and no variable says where rank 0 is"),
    ],
)
def test_variables_that_cannot_be_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        launched_process(variables)


def test_ports_of_two_jobs_differ() -> None:
    ports = {launched_process({**OPEN_MPI, "PMIX_NAMESPACE": job}).address for job in ("12", "13")}  # type: ignore[union-attr]
    assert len(ports) == 2


MORE_STEPS = """
import json
losses = [float(loss.detach())]
for _ in range(3):
    optimizer.zero_grad()
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
print(json.dumps([torch.distributed.get_world_size(), losses]), flush=True)
"""


def plain_losses() -> list[float]:
    """Of the README's example without autopar, in one process."""
    names: dict[str, Any] = {}
    exec(readme_example().split("print(autopar.plan")[0], names)
    optimizer = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = names["model"](**names["batch"])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def launcher(name: str, folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """(command, variables) with which a launcher starts two Python processes; skips the test where it is absent."""
    python = [sys.executable]
    if name == "torchrun":
        yield [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], {}
    elif name == "mpirun":
        if shutil.which("ompi_info") is None:
            pytest.skip("mpirun of Open MPI is not installed (Debian: openmpi-bin)")
        as_anyone = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        yield ["mpirun", "-n", "2", *python], {**as_anyone, "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    else:
        if absent := one_node_slurm.missing():
            pytest.skip(f"{absent} of Slurm not installed (Debian: slurm-wlm)")
        with one_node_slurm.one_node_slurm(folder / "slurm") as variables:
            yield ["srun", "-n", "2", *python], variables


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["torchrun", "mpirun", "srun"])
def test_the_readme_under_a_launcher_is_one_job_that_trains_as_one_process(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(readme_example() + MORE_STEPS)
    with launcher(name, tmp_path) as (command, variables):
        done = subprocess.run(
            [*command, str(script)],
            cwd=ROOT, env={**os.environ, **variables}, text=True, capture_output=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # two processes write to one pipe, and the end of a line is a write of its own
    found = [json.loads(losses) for losses in re.findall(r"\[2, (\[[^\]]*\])\]", done.stdout)]
    assert len(found) == 2, done.stdout
    assert found[0] == found[1] == pytest.approx(plain_losses(), rel=1e-5)


def launched(rank: int, size: int, port: int) -> Launched:
    return Launched(launcher="torchrun", rank=rank, world_size=size, local_rank=rank, address=f"127.0.0.1:{port}")


def joined(*processes: Launched, seconds: float = 20.0, number: int = 0) -> list[BaseException | None]:
    """What each of these processes, here threads of one store, ends with."""
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}

    def join(process: Launched) -> BaseException | None:
        try:
            met_store(process, agent, seconds, number)
        except AutoparError as error:
            return error
        return None

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(join, processes))


@pytest.fixture
def store() -> dist.TCPStore:  # type: ignore[name-defined]
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def test_processes_that_are_told_the_same_join(store: dist.TCPStore) -> None:  # type: ignore[name-defined]
    processes = [launched(rank, 3, store.port) for rank in range(3)]
    for number in range(2):  # the second time behind destroy_process_group
        assert joined(*processes, number=number) == [None] * 3


def test_two_processes_of_one_rank_are_refused_on_both(store: dist.TCPStore) -> None:  # type: ignore[name-defined]
    for error in joined(launched(0, 2, store.port), launched(0, 2, store.port)):
        assert isinstance(error, ConfigurationError)
        assert "two processes were told that they are rank 0 of 2" in str(error)


def test_other_numbers_of_processes_are_refused_on_both(store: dist.TCPStore) -> None:  # type: ignore[name-defined]
    for error in joined(launched(0, 2, store.port), launched(1, 3, store.port)):
        assert isinstance(error, ConfigurationError)
        assert "WORLD_SIZE" in str(error)


def test_who_does_not_come_is_named(store: dist.TCPStore) -> None:  # type: ignore[name-defined]
    for error in joined(launched(0, 4, store.port), launched(2, 4, store.port), seconds=0.2):
        assert isinstance(error, RankLostError)
        assert "ranks 1, 3 of 4 did not join" in str(error)

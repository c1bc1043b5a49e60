"""Launchers: what their variables say, and the README's example under torchrun, which is one job and not several."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.errors import AutoparError, ConfigurationError, RankLostError
from autopar.runtime.launchers import Launched, launched_process, met_store
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


@pytest.mark.slow
@pytest.mark.distributed
def test_the_readme_under_torchrun_is_one_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    told = "print(json.dumps([torch.distributed.get_world_size(), float(loss)]), flush=True)"
    script.write_text(f"{readme_example()}\nimport json\n{told}\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[2, ")]
    assert len(found) == 2, done.stdout
    assert found[0] == found[1]


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

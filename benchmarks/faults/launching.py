"""Point 1: how processes learn of each other: variables of launchers, plans for other numbers of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

import torch.distributed as dist

import autopar
from benchmarks.faults.fault import Fault, Scene, Wrong, fault, make_fault
from benchmarks.faults.victims import Net, batch, command, compiled, expect_step, sound_plan

OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


def _as(scene: Scene, variables: Mapping[str, str]) -> None:
    """Stand as another launcher would have started this process; rank 0 makes the store."""
    for name in OF_TORCHRUN:
        os.environ.pop(name, None)
    os.environ["MASTER_PORT"] = str(20_000 + int(os.environ["MASTER_PORT"]) % 10_000)
    os.environ.update({name: value.format(rank=scene.rank, size=scene.processes) for name, value in variables.items()})


def _one_job(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    if not dist.is_initialized() or dist.get_world_size() != scene.processes:
        raise Wrong(f"{scene.processes} processes run as jobs of their own")
    expect_step(module, Net(), batch())


@fault(1, "torchrun starts the processes, the script calls compile only", on=("dp2", "shard4"), right=True,
       joined=False)  # fmt: skip
def under_torchrun(scene: Scene) -> None:
    _one_job(scene)


@fault(1, "mpirun of Open MPI starts the processes, the script calls compile only", on=("dp2",), right=True,
       joined=False)  # fmt: skip
def under_mpirun(scene: Scene) -> None:
    _as(scene, {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{size}"})
    _one_job(scene)


@fault(1, "srun starts the processes, the script calls compile only", on=("dp2",), right=True, joined=False)
def under_srun(scene: Scene) -> None:
    _as(scene, {"SLURM_PROCID": "{rank}", "SLURM_STEP_NUM_TASKS": "{size}", "SLURM_LOCALID": "{rank}"})
    _one_job(scene)


@fault(1, "both processes are told to be rank 0", on=("dp2",), words=("rank 0",), joined=False)
def twice_rank_0(scene: Scene) -> None:
    os.environ["RANK"] = "0"
    compiled(scene, Net(), batch())


@fault(1, "rank 1 ends before it joins the job", on=("dp2",), words=("rank[s]? .*1",), culprits={1}, joined=False,
       environment={"AUTOPAR_HEARTBEAT": "1"})  # fmt: skip
def never_joins(scene: Scene) -> None:
    if scene.rank == 0:
        compiled(scene, Net(), batch())


@fault(1, "one rank is told another number of processes", on=("dp2",), words=("rank 1", "WORLD_SIZE"), joined=False)
def other_world(scene: Scene) -> None:
    os.environ["WORLD_SIZE"] = str(2 + scene.rank)
    compiled(scene, Net(), batch())


@fault(1, "the script leaves the job behind a training, and compiles again", on=("dp2",), right=True, joined=False)
def joined_twice(scene: Scene) -> None:
    _one_job(scene)
    dist.destroy_process_group()
    _one_job(scene)


VARIABLES: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "a rank beyond the size": ({"RANK": "5", "WORLD_SIZE": "2"}, ("RANK=5", "WORLD_SIZE=2")),
    "a size in words": ({"RANK": "0", "WORLD_SIZE": "two"}, ("WORLD_SIZE='two'",)),
    "a negative rank": ({"RANK": "-1", "WORLD_SIZE": "2"}, ("RANK=-1",)),
    "two nodes of Open MPI without an address": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        ("MASTER_ADDR",),
    ),
}


def _with_variables(variables: Mapping[str, str], scene: Scene) -> None:
    os.environ.update(variables)
    compiled(scene, Net(), batch())


VARIABLES_THAT_CANNOT_BE: tuple[Fault, ...] = tuple(
    make_fault(1, name.replace(" ", "_"), f"the launcher's variables say {name}", partial(_with_variables, values),
               words=words)
    for name, (values, words) in VARIABLES.items()
)  # fmt: skip


def _load_sound(scene: Scene) -> None:
    path = scene.folder / f"plan-{scene.rank}.json"
    path.write_bytes(sound_plan())
    os.environ["AUTOPAR_PLAN"] = str(path)
    autopar.compile(Net(), batch())


@fault(1, "a plan for 8 devices is run on fewer processes", on=("alone", "dp2"), words=("8", "torchrun|processes"))
def plan_of_another_size(scene: Scene) -> None:
    _load_sound(scene)


@fault(1, "autopar run is given a plan that is not there", words=("nowhere.json",))
def run_without_a_plan(scene: Scene) -> None:
    (scene.folder / "train.py").write_text("print('ran')\n")
    command("run", "--plan", "nowhere.json", "--", "train.py")


@fault(1, "autopar run is given a script that is not there", words=("train.py",))
def run_without_a_script(scene: Scene) -> None:
    (scene.folder / "plan.json").write_bytes(sound_plan())
    command("run", "--plan", "plan.json", "--", "train.py")

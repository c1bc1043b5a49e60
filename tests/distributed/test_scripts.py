"""The scripts of examples/, a few steps each, on one process and on two: they learn, and what they print agrees."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.pool import forked
from tests.distributed.script_jobs import EXAMPLES

JOB = "tests.distributed.script_jobs:run_script"
Start = Callable[..., str]

SAME = ("gpt_pretrain.py", "image_classifier.py")
"""Their batches are the same on any number of processes, so their losses are."""
OTHERS = ("finetune_weights.py", "experts_on_a_cluster.py")
OF_PACKAGES = {
    "hf_trainer.py": ("accelerate",),
    "accelerate_lora.py": ("accelerate", "peft"),
    "lightning_fit.py": ("lightning",),
}
FAULT = "resume_after_fault.py"

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """start(script, arguments, processes) -> what rank 0 printed. Workers are the file's own: packages keep state."""
    pool = forked(2)

    def run(name: str, arguments: list[str], processes: int, folder: Path | None = None) -> str:
        place = folder or tmp_path_factory.mktemp(name.partition(".")[0])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        printed: list[str] = pool.run(
            JOB, world_size=processes, timeout=300.0, name=name, arguments=arguments, folder=str(place), port=port
        )
        return printed[0]

    yield run
    pool.close()


def losses_of(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", printed)]


def figures_of(printed: str) -> list[float]:
    """Losses, and what else was measured."""
    return [float(number) for number in re.findall(r"\d+\.\d+", printed)]


def test_every_script_is_run_here_and_named_in_its_table() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*SAME, *OTHERS, *OF_PACKAGES, FAULT}
    assert names == set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))


@pytest.mark.exhaustive(sample="image_classifier.py")
@pytest.mark.parametrize("name", SAME)
def test_a_script_learns_the_same_on_one_process_and_on_two(name: str, start: Start) -> None:
    alone, together = (start(name, ["--steps", "8"], processes) for processes in (1, 2))
    losses = losses_of(alone)
    assert losses[-1] < losses[0] - 0.1
    assert figures_of(together) == pytest.approx(figures_of(alone), abs=2e-3)


@pytest.mark.exhaustive(sample="finetune_weights.py")
@pytest.mark.parametrize("name", OTHERS)
def test_a_script_learns(name: str, start: Start) -> None:
    losses = losses_of(start(name, ["--steps", "8"], 2))
    assert losses[-1] < losses[0] - 0.1


def test_a_run_that_a_fault_ended_goes_on_with_another_number_of_processes(start: Start, tmp_path: Path) -> None:
    before = start(FAULT, ["--steps", "15", "--fail-at", "12"], 2, tmp_path)
    after = start(FAULT, ["--steps", "15"], 1, tmp_path)
    assert "a fault at step 12" in before
    assert "goes on behind step 10" in after
    assert losses_of(after)[-1] < losses_of(before)[0] - 0.1


@pytest.mark.parametrize("name", OF_PACKAGES)
def test_a_script_of_a_framework_learns(name: str, start: Start) -> None:
    absent = [package for package in OF_PACKAGES[name] if find_spec(package) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed: pip install 'autopar[{','.join(absent)}]'")
    for processes in (1, 2):
        devices = ["--devices", "2"] if name == "lightning_fit.py" and processes == 2 else []
        losses = losses_of(start(name, ["--steps", "12", *devices], processes))
        assert losses[-1] < losses[0] - 0.1

"""The cases of the planner benchmark: a workload on H100 nodes of eight, on a given mesh or with the mesh left free."""

from __future__ import annotations

from dataclasses import dataclass

NO_LIMIT_BYTES = 2.0**50


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """mesh: None lets the planner choose. memory_limit: bytes, text, or None for what the device holds. goal_seconds
    and must_seconds: CPU seconds of the row, where a goal is set. raw: also given as it is to HiGHS and CP-SAT.
    with_baselines: whether the known plans are solved beside it, as `autopar plan` does."""

    workload: str
    devices: int
    mesh: tuple[int, ...] | None = None
    memory_limit: float | str | None = None
    batch: int | None = None
    goal_seconds: float | None = None
    must_seconds: float | None = None
    raw: bool = False
    with_baselines: bool = False

    @property
    def name(self) -> str:
        """As `--case` takes it: workload@8 with the mesh left free, workload@mesh2x4 with a given one."""
        return f"{self.workload}@{'mesh' + 'x'.join(map(str, self.mesh)) if self.mesh else self.devices}"


CASES: tuple[Case, ...] = (
    Case(workload="tiny", devices=8, mesh=(8,), memory_limit=NO_LIMIT_BYTES, raw=True),
    Case(workload="tiny", devices=8, mesh=(2, 4), memory_limit=NO_LIMIT_BYTES, raw=True),
    Case(workload="gpt2", devices=8, mesh=(8,), memory_limit=NO_LIMIT_BYTES, goal_seconds=5, raw=True),
    Case(workload="gpt2", devices=8, mesh=(2, 4), memory_limit=NO_LIMIT_BYTES, goal_seconds=6, raw=True),
    Case(
        workload="llama3-8b",
        devices=8,
        mesh=(8,),
        memory_limit=NO_LIMIT_BYTES,
        batch=16,
        goal_seconds=25,
        raw=True,
    ),
    Case(
        workload="llama3-8b",
        devices=256,
        mesh=(32, 8),
        memory_limit=NO_LIMIT_BYTES,
        batch=64,
        goal_seconds=30,
        must_seconds=45,
        raw=True,
    ),
    Case(workload="gpt2", devices=16),
    Case(workload="llama3-8b", devices=8, batch=16),
    Case(workload="llama3-8b", devices=64, batch=64),
    Case(workload="llama3-8b", devices=256, batch=256, goal_seconds=60, must_seconds=120),
    Case(workload="llama3-70b", devices=512),
    Case(workload="llama3.1-405b", devices=16384, memory_limit="80GB", goal_seconds=300, must_seconds=900),
    Case(workload="olmoe-64-experts", devices=64),
    Case(workload="unet", devices=8),
    Case(workload="vit-22b", devices=256),
    Case(workload="t5-11b", devices=64),
)
"""Without a limit where the peers' published rows have none; what the device holds elsewhere."""


def _task(workload: str, devices: int, goal: float, must: float, batch: int | None = None) -> Case:
    return Case(
        workload=workload, devices=devices, batch=batch, goal_seconds=goal, must_seconds=must, with_baselines=True
    )


TASKS: tuple[Case, ...] = (
    _task("gpt2", 8, 8, 12),
    _task("llama3-8b", 16, 20, 35, batch=32),
    _task("llama3-8b", 64, 20, 35, batch=64),
    _task("llama3-8b", 256, 20, 35, batch=256),
    _task("llama3-70b", 512, 30, 60),
    _task("llama3.1-405b", 16384, 60, 120),
    _task("olmoe-64-experts", 64, 30, 60),
    _task("vit-22b", 256, 30, 60),
    _task("unet", 8, 15, 30),
)
"""What people ask first, with everything that `autopar plan` does in its default mode."""


def case_named(name: str, cases: tuple[Case, ...] = CASES) -> Case:
    """Raises KeyError with the known names."""
    known = {case.name: case for case in cases}
    if name not in known:
        raise KeyError(f"{name!r}: known cases are {', '.join(known)}")
    return known[name]

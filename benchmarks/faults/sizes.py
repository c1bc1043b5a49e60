"""Point 13: numbers without bounds, in arguments, plans and calls."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from benchmarks.faults.fault import Fault, Scene, Wrong, fault, make_fault
from benchmarks.faults.victims import Net, batch, command, compiled, expect_step, sound_pipeline, sound_plan

ARGUMENTS: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a billion micro-batches": ({"cluster": "2 cpu", "micro_batches": 10**9}, ("micro_batches",)),
    "a billion micro-batches in a pipeline": (
        {"cluster": "2 cpu", "dims": {"pp": 2}, "micro_batches": 10**9},
        ("micro.batches",),
    ),
    "a billion stages": ({"cluster": "2 cpu", "dims": {"pp": 10**9}}, ("pp",)),
    "a mesh of a billion": ({"cluster": "2 cpu", "mesh": (10**9,)}, ("mesh|devices|cluster",)),
    "a mesh of forty axes": ({"cluster": "2 cpu", "mesh": (2,) * 40}, ("mesh|devices|axes",)),
    "a cluster of a billion nodes": ({"cluster": "1000000000x8 H100-SXM"}, ("devices",)),
    "a cluster of ten to the thirty": ({"cluster": f"{10**30}x8 H100-SXM"}, ("devices",)),
    "a node of a billion devices": ({"cluster": "1x1000000000 H100-SXM"}, ("devices",)),
    "a thousand kinds of devices": ({"cluster": " + ".join(["1x8 H100-SXM"] * 1000)}, ("devices|kinds|parts|nodes",)),
    "a time limit of nanoseconds": ({"cluster": "2 cpu", "time_limit": 1e-9}, ()),
}


def _plan(options: dict[str, Any], scene: Scene) -> None:
    autopar.plan(Net(), batch(), **{"mode": "fast", **options})


NUMBERS: tuple[Fault, ...] = tuple(
    make_fault(13, name.replace(" ", "_"), f"autopar.plan is asked for {name}", partial(_plan, options),
               words=words, right=not words)
    for name, (options, words) in ARGUMENTS.items()
)  # fmt: skip


def _changed(document: bytes, change: Mapping[str, Any], scene: Scene) -> None:
    path = scene.folder / "plan.json"
    path.write_text(json.dumps({**json.loads(document), **change}))
    for words in (("show", path), ("simulate", path), ("memory", path, "--trust")):
        command(*words)


@fault(13, "a plan file says a billion micro-batches", words=("micro_batches",))
def micro_batches_in_a_plan(scene: Scene) -> None:
    _changed(sound_plan(), {"micro_batches": 10**9}, scene)


@fault(13, "a plan file of a pipeline says a billion micro-batches", words=("micro_batches",))
def micro_batches_in_a_pipeline(scene: Scene) -> None:
    _changed(sound_pipeline(), {"micro_batches": 10**9}, scene)


@fault(13, "a plan file has a mesh of a billion devices", words=("mesh|devices",))
def mesh_in_a_plan(scene: Scene) -> None:
    _changed(sound_plan(), {"mesh": {"axis_names": ["dp_shard"], "shape": [10**9]}}, scene)


@fault(13, "a plan file of 120 MB", words=("plan.json", "bytes"))
def huge_plan(scene: Scene) -> None:
    path = scene.folder / "plan.json"
    with path.open("wb") as file:
        file.write(sound_plan().rstrip()[:-1] + b', "more": [')
        for _ in range(120):
            file.write(b"0," * 500_000)
        file.write(b"0]}")
    command("show", path)


@fault(13, "a plan file with 200,000 operators more", words=("plan.json",), right=True, seconds=60.0)
def many_operators(scene: Scene) -> None:
    document = json.loads(sound_plan())
    name, entry = next(iter(document["operators"].items()))
    document["operators"] |= {f"{name}-{index}": entry for index in range(200_000)}
    path = scene.folder / "plan.json"
    path.write_text(json.dumps(document))
    command("show", path)


@fault(13, "a module is called with 25 shapes", on=("alone", "dp2"), right=True, seconds=90.0)
def many_shapes(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    for size in range(2, 52, 2):
        expect_step(module, Net(), batch(size=size))
    for size in (2, 8, 50):
        expect_step(module, Net(), batch(size=size))


@fault(13, "200 shapes pass by: what is kept of them is bounded", right=True, seconds=150.0)
def kept_graphs(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    for size in range(1, 65):
        module(**batch(size=size))
    gc.collect()
    kept = sum(isinstance(each, torch.fx.GraphModule) for each in gc.get_objects())
    for size in range(65, 129):
        module(**batch(size=size))
    gc.collect()
    more = sum(isinstance(each, torch.fx.GraphModule) for each in gc.get_objects())
    if more > kept + 2:
        raise Wrong(f"64 shapes kept {kept} graphs, 64 more {more}: there is no bound")


class Branches(nn.Module):
    """As many small layers side by side, added up."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(branch(x)).pow(2).mean() for branch in self.branches]).sum()


@fault(13, "a model of 600 branches is planned in fast mode", right=True, seconds=150.0)
def many_branches(scene: Scene) -> None:
    autopar.plan(Branches(600), {"x": batch()["x"]}, cluster="4 cpu", mode="fast")


@fault(13, "a planning limit of 2 s on a deep model", right=True, seconds=60.0)
def time_limit(scene: Scene) -> None:
    autopar.plan(Net(layers=60), batch(), cluster="8 cpu", time_limit=2.0)

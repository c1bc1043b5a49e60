"""Point 2: ranks that build other weights than their neighbours, or another model."""

from __future__ import annotations

import torch

from benchmarks.faults.fault import Scene, fault
from benchmarks.faults.victims import Net, Normalised, batch, compiled, expect_step, expect_weights

SPLITS = ("dp2", "shard4", "tp2", "pp2", "shard2tp2")


@fault(2, "every rank builds the model from a seed of its own", on=SPLITS, right=True)
def seeds_apart(scene: Scene) -> None:
    module = compiled(scene, Net(seed=scene.rank), batch())
    expect_step(module, Net(seed=0), batch())


@fault(2, "buffers differ between ranks", on=("dp2", "tp2"), right=True)
def buffers_apart(scene: Scene) -> None:
    model = Normalised()
    model.get_buffer("norm.running_mean").fill_(float(scene.rank))
    module = compiled(scene, model, batch())
    expect_weights(module, Normalised())


@fault(2, "the weights of rank 1 are NaN", on=("dp2", "shard4"), right=True)
def not_a_number(scene: Scene) -> None:
    model = Net()
    if scene.rank == 1:
        torch.nn.init.constant_(model.head.weight, float("nan"))
    expect_step(compiled(scene, model, batch()), Net(), batch())


@fault(2, 'weights differ and sync="check" asks for an error', on=("dp2", "shard4"), words=("rank[s]? .*1",))
def checked(scene: Scene) -> None:
    compiled(scene, Net(seed=int(scene.rank == 1)), batch(), sync="check")


@fault(2, "rank 1 builds one block more", on=("dp2", "tp4"), words=("rank[s]? .*1",))
def more_blocks(scene: Scene) -> None:
    compiled(scene, Net(layers=3 if scene.rank == 1 else 2), batch())


@fault(2, "rank 1 holds its weights in fp64", on=("dp2",), words=("rank[s]? .*1",))
def other_dtype(scene: Scene) -> None:
    kind = torch.float64 if scene.rank == 1 else torch.float32
    inputs = batch()
    compiled(scene, Net().to(kind), {**inputs, "x": inputs["x"].to(kind)})


@fault(2, "rank 1 freezes a block", on=("dp2", "pp2"), words=("rank[s]? .*1",))
def frozen_on_one(scene: Scene) -> None:
    model = Net()
    model.blocks[0].requires_grad_(scene.rank != 1)
    compiled(scene, model, batch())


@fault(2, "rank 1 names its head otherwise", on=("dp2",), words=("rank[s]? .*1",))
def other_names(scene: Scene) -> None:
    model = Net()
    if scene.rank == 1:
        model.blocks = torch.nn.ModuleList(reversed(list(model.blocks)))
        model.blocks[1].register_parameter("bias", None)
    compiled(scene, model, batch())

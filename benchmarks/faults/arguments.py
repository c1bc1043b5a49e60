"""Point 16, and what is near: arguments of compile and plan, and options of the commands, that cannot mean anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import autopar
from benchmarks.faults.fault import Fault, Scene, fault, make_fault
from benchmarks.faults.victims import MODEL, Net, batch, command, compiled, expect_step, sound_plan

ON_FOUR = {"cluster": "4 H100-SXM"}
ARGUMENTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "cluster=3": ({"cluster": 3}, "cluster"),
    "cluster=''": ({"cluster": ""}, "cluster"),
    "cluster of zero nodes": ({"cluster": "0x8 H100-SXM"}, "cluster|device"),
    "cluster of zero devices": ({"cluster": "2x0 H100-SXM"}, "cluster|device"),
    "cluster of negative nodes": ({"cluster": "-2x8 H100-SXM"}, "cluster"),
    "cluster of unknown devices": ({"cluster": "8 H900"}, "H900"),
    "cluster at zero rate": ({"cluster": "2x8 H100-SXM @ 0Gb"}, "rate|bandwidth|bytes_per_second|0Gb"),
    "cluster at negative rate": ({"cluster": "2x8 H100-SXM @ -1Gb"}, "cluster|rate"),
    "cluster at infinite rate": ({"cluster": "2x8 H100-SXM @ infGb"}, "cluster|rate"),
    "cluster file that is not there": ({"cluster": "nowhere.json"}, "nowhere.json"),
    "cluster that is a list": ({"cluster": ["H100"]}, "cluster"),
    "memory_limit=1B": ({**ON_FOUR, "memory_limit": "1B"}, "memory_limit|fits"),
    "memory_limit in words": ({**ON_FOUR, "memory_limit": "lots"}, "memory_limit"),
    "memory_limit of nothing": ({**ON_FOUR, "memory_limit": 0}, "memory_limit"),
    "memory_limit below zero": ({**ON_FOUR, "memory_limit": -1.0}, "memory_limit"),
    "memory_limit of NaN": ({**ON_FOUR, "memory_limit": math.nan}, "memory_limit"),
    "memory_limit that is a list": ({**ON_FOUR, "memory_limit": [1]}, "memory_limit"),
    "dims that do not divide": ({**ON_FOUR, "dims": {"tp": 3}}, "3"),
    "dims of zero": ({**ON_FOUR, "dims": {"tp": 0}}, "tp"),
    "dims of minus two": ({**ON_FOUR, "dims": {"tp": -2}}, "tp"),
    "dims with two open axes": ({**ON_FOUR, "dims": {"tp": -1, "dp_shard": -1}}, "-1"),
    "dims of an unknown axis": ({**ON_FOUR, "dims": {"data": 4}}, "data"),
    "dims in words": ({**ON_FOUR, "dims": {"tp": "four"}}, "tp|four"),
    "dims of a half": ({**ON_FOUR, "dims": {"tp": 0.5}}, "tp|0.5"),
    "dims that are a list": ({**ON_FOUR, "dims": ["tp", 4]}, "dims"),
    "dims with a number for a name": ({**ON_FOUR, "dims": {4: 4}}, "4"),
    "stages of no devices": ({**ON_FOUR, "dims": {"pp": [4, 0]}}, "pp"),
    "more stages than blocks": ({**ON_FOUR, "dims": {"pp": 4}}, "stages|blocks|pp"),
    "mesh that does not fill": ({**ON_FOUR, "mesh": (3,)}, "mesh|cluster"),
    "mesh of zero": ({**ON_FOUR, "mesh": (0, 4)}, "mesh|0"),
    "mesh of nothing": ({**ON_FOUR, "mesh": ()}, "mesh"),
    "mesh in words": ({**ON_FOUR, "mesh": "four"}, "mesh"),
    "mesh that is a number": ({**ON_FOUR, "mesh": 4}, "mesh"),
    "mesh beside dims": ({**ON_FOUR, "mesh": (4,), "dims": {"tp": 4}}, "mesh|dims"),
    "schedule without stages": ({**ON_FOUR, "schedule": "1f1b"}, "schedule"),
    "schedule of no family": ({**ON_FOUR, "dims": {"pp": 2}, "schedule": "2f2b"}, "schedule"),
    "schedule that is a number": ({**ON_FOUR, "dims": {"pp": 2}, "schedule": 7}, "schedule"),
    "precision fp8": ({**ON_FOUR, "precision": "fp8"}, "precision"),
    "precision of fantasy": ({**ON_FOUR, "precision": "fp3"}, "precision"),
    "precision that is a dtype": ({**ON_FOUR, "precision": torch.bfloat16}, "precision"),
    "micro_batches of zero": ({**ON_FOUR, "micro_batches": 0}, "micro_batches"),
    "micro_batches below zero": ({**ON_FOUR, "micro_batches": -4}, "micro_batches"),
    "micro_batches of a half": ({**ON_FOUR, "micro_batches": 0.5}, "micro_batches"),
    "micro_batches beyond the batch": ({**ON_FOUR, "micro_batches": 64}, "micro_batches|batch"),
    "micro_batches in words": ({**ON_FOUR, "micro_batches": "two"}, "micro_batches"),
    "mode of fantasy": ({**ON_FOUR, "mode": "exact"}, "mode"),
    "time_limit below zero": ({**ON_FOUR, "time_limit": -1.0}, "time_limit"),
    "time_limit of NaN": ({**ON_FOUR, "time_limit": math.nan}, "time_limit"),
    "time_limit in words": ({**ON_FOUR, "time_limit": "soon"}, "time_limit"),
    "recompute of fantasy": ({**ON_FOUR, "recompute": "sometimes"}, "recompute"),
    "recompute that is True": ({**ON_FOUR, "recompute": True}, "recompute"),
    "constraints that match nothing": ({**ON_FOUR, "constraints": {"nothing.*": {"tp": "R"}}}, "nothing"),
    "constraints of no placement": ({**ON_FOUR, "constraints": {"head.weight": {"*": "S(x)"}}}, "head.weight|S.x"),
    "constraints that are a number": ({**ON_FOUR, "constraints": 3}, "constraints"),
    "constraints of lists": ({**ON_FOUR, "constraints": {"head.weight": ["R"]}}, "head.weight|constraints"),
    "optimizer that is a number": ({**ON_FOUR, "optimizer": 3}, "optimizer"),
    "optimizer of fantasy": ({**ON_FOUR, "optimizer": "adamwise"}, "optimizer"),
    "loss_fn that is a number": ({**ON_FOUR, "loss_fn": 3}, "loss_fn"),
    "warm_start that is not there": ({**ON_FOUR, "warm_start": "nowhere.json"}, "nowhere.json"),
    "warm_start that is a number": ({**ON_FOUR, "warm_start": 3}, "warm_start"),
    "cache_dir that is a number": ({**ON_FOUR, "cache_dir": 3}, "cache_dir"),
    "batch_dims of no input": ({**ON_FOUR, "batch_dims": {"y": 0}}, "batch_dims|y"),
    "batch_dims beyond the dims": ({**ON_FOUR, "batch_dims": {"x": 7}}, "batch_dims|x"),
    "batch_dims in words": ({**ON_FOUR, "batch_dims": {"x": "first"}}, "batch_dims|x"),
}


def _plan(options: dict[str, Any], scene: Scene) -> None:
    autopar.plan(Net(), batch(), **{"mode": "fast", **options})


PLANNED: tuple[Fault, ...] = tuple(
    make_fault(16, name.replace(" ", "_"), f"autopar.plan is given {name}", partial(_plan, options), words=(words,))
    for name, (options, words) in ARGUMENTS.items()
)  # fmt: skip

COMPILED_WITH: Mapping[str, tuple[dict[str, Any], str]] = {
    "batch of fantasy": ({"batch": "mine"}, "batch"),
    "sync of fantasy": ({"sync": "always"}, "sync"),
    "plan that is a number": ({"plan": 3}, "plan"),
    "plan that is a dictionary": ({"plan": {}}, "plan"),
    "scaler that is a number": ({"scaler": 1024.0}, "scaler"),
    "verify without inputs": ({"verify": True, "example_inputs": None}, "example_inputs"),
    "differentiable of fantasy": ({"differentiable": 3}, "differentiable"),
}


def _compile(options: dict[str, Any], scene: Scene) -> None:
    compiled(scene, Net(), **{"inputs": options.get("example_inputs", batch())} | {
        name: value for name, value in options.items() if name != "example_inputs"
    })  # fmt: skip


COMPILED: tuple[Fault, ...] = tuple(
    make_fault(16, name.replace(" ", "_"), f"autopar.compile is given {name}", partial(_compile, options),
               layout=layout, words=(words,))
    for name, (options, words) in COMPILED_WITH.items()
    for layout in (("alone", "dp2") if name in ("batch of fantasy", "plan that is a number") else ("alone",))
)  # fmt: skip


def _on_one(options: dict[str, Any], scene: Scene) -> None:
    """Only rank 1 asks for something else: either rank 0 decides for all, or every rank is told."""
    expect_step(compiled(scene, Net(), batch(), **(options if scene.rank == 1 else {})), Net(), batch())


DIFFERENT: Mapping[str, dict[str, Any]] = {
    "other dims": {"dims": {"tp": 2}},
    "another precision": {"precision": "bf16"},
    "dims that cannot be": {"dims": {"tp": 3}},
    "another batch mode": {"batch": "local"},
    "a sync of its own": {"sync": "check"},
    "a memory limit": {"memory_limit": "1KB"},
    "a recompute of its own": {"recompute": "full"},
    "an argument of fantasy": {"mode": "exact"},
}

ON_ONE_RANK: tuple[Fault, ...] = tuple(
    make_fault(16, f"{name} on rank 1".replace(" ", "_"), f"only rank 1 calls compile with {name}",
               partial(_on_one, options), layout="dp2", right=True, words=("rank[s]? .*1",))
    for name, options in DIFFERENT.items()
)  # fmt: skip


INPUTS: Mapping[str, tuple[Any, str]] = {
    "none at all": ((), "forward|labels"),
    "a word": ("tokens", "example inputs|inputs"),
    "a name that forward does not take": ({**batch(), "y": torch.ones(1)}, "y"),
    "a name too few": ({"x": batch()["x"]}, "labels"),
    "another width": ({**batch(), "x": torch.randn(8, 9)}, "cannot be traced|8|9"),
    "words for numbers": ({**batch(), "labels": torch.rand(8)}, "cannot be traced|labels"),
    "a list of lists": ([[1.0] * 8] * 8, "inputs|forward"),
    "unequal numbers of samples": ({**batch(), "labels": batch(size=6)["labels"]}, "cannot be traced|6|8"),
    "a tensor on another device": ({**batch(), "x": torch.empty(8, 8, device="meta")}, ""),
}


def _with_inputs(inputs: Any, scene: Scene) -> None:
    compiled(scene, Net(), inputs)


EXAMPLES: tuple[Fault, ...] = tuple(
    make_fault(16, f"example inputs: {name}".replace(" ", "_"), f"the example inputs are {name}",
               partial(_with_inputs, inputs), words=(words,) if words else (), right=not words)
    for name, (inputs, words) in INPUTS.items()
)  # fmt: skip


WORDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "a command of fantasy": (("plot",), "plot|command"),
    "an option of fantasy": (("plan", MODEL, "--fast"), "--fast"),
    "a model that is no module": (("plan", "nowhere:make"), "nowhere"),
    "a model without a factory": (("plan", "json"), "json|factory"),
    "a factory that is not there": (("plan", "json:nowhere"), "nowhere"),
    "a factory that is no function": (("plan", "sys:path"), "sys:path|callable|function"),
    "a factory that takes nothing": (("plan", "os:getcwd"), "os:getcwd|getcwd"),
    "a factory that fails": (("plan", "operator:truediv", "--batch", "1", "--seq", "1"), "truediv|Module|module"),
    "a batch of zero": (("plan", MODEL, "--batch", "0"), "batch"),
    "a batch in words": (("plan", MODEL, "--batch", "many"), "many"),
    "a cluster of fantasy": (("plan", MODEL, "--cluster", "8 H900"), "H900"),
    "dims without a size": (("plan", MODEL, "--dims", "tp"), "tp"),
    "dims that do not divide": (("plan", MODEL, "--cluster", "4 H100-SXM", "--dims", "tp=3"), "3"),
    "a mesh in words": (("plan", MODEL, "--mesh", "2,x"), "2,x"),
    "a constraint without a placement": (("plan", MODEL, "--constraint", "tp"), "tp"),
    "a memory limit in words": (("plan", MODEL, "--cluster", "4 H100-SXM", "--memory-limit", "lots"), "lots"),
    "a memory limit of a byte": (("plan", MODEL, "--cluster", "4 H100-SXM", "--memory-limit", "1B"), "fits|1 B|memory"),
    "a warm start that is not there": (("plan", MODEL, "--warm-start", "nowhere.json"), "nowhere.json"),
    "show of nothing": (("show", "nowhere.json"), "nowhere.json"),
    "show of a rank beyond": (("show", "plan.json", "--trust", "--code", "99"), "99|rank"),
    "explain of nothing": (("explain", "plan.json", "--trust", "nowhere.weight"), "nowhere.weight"),
    "export to nothing": (("export", "plan.json", "--to", "paper"), "paper"),
    "diff with itself gone": (("diff", "plan.json", "gone.json"), "gone.json"),
    "edit of nothing": (("edit", "plan.json", "--trust", "--set", "nowhere=R", "-o", "x.json"), "nowhere"),
    "edit to no placement": (("edit", "plan.json", "--trust", "--set", "head.weight=Q", "-o", "x.json"), "Q"),
    "what-if of no wish": (("what-if", "plan.json", "--trust", "--memory-limit", "none"), "none|memory"),
    "simulate of nothing": (("simulate", "gone.json"), "gone.json"),
    "calibrate of nothing": (("calibrate", "gone.json", "run.jsonl", "-o", "new.json"), "run.jsonl"),
    "verify of zero processes": (("verify", MODEL, "--processes", "0"), "processes"),
    "rules of no operator": (("rules", "show", "aten::nothing"), "nothing"),
    "rules of an import that fails": (("rules", "show", "aten::mm", "--import", "nowhere"), "nowhere"),
}


def _typed(words: tuple[str, ...], scene: Scene) -> None:
    (scene.folder / "plan.json").write_bytes(sound_plan())
    command(*words)


TYPED: tuple[Fault, ...] = tuple(
    make_fault(16, f"typed {name}".replace(" ", "_"), f"autopar {' '.join(words)}", partial(_typed, words),
               words=(named,))
    for name, (words, named) in WORDS.items()
)  # fmt: skip


@fault(16, "compile is given a function", words=("Module",))
def no_module(scene: Scene) -> None:
    autopar.compile(torch.tanh, (torch.ones(2),))  # type: ignore[arg-type]


@fault(16, "compile is given a class", words=("Module",))
def a_class(scene: Scene) -> None:
    autopar.compile(nn.Linear, (torch.ones(2),))  # type: ignore[arg-type]

"""Point 16: damaged plans, clusters, profiles, logs and configurations of other tools, where they are read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import autopar
from autopar.plans.parallel_plan import Plan
from benchmarks.faults.fault import Fault, Scene, fault, make_fault
from benchmarks.faults.victims import MODEL, ON, Net, batch, command, sound_pipeline, sound_plan

Damage = Callable[[bytes], bytes]


def _text(content: bytes) -> Damage:
    return lambda sound: content


def _edited(change: Callable[[Any], object]) -> Damage:
    def edit(sound: bytes) -> bytes:
        document = copy.deepcopy(json.loads(sound))
        change(document)
        return json.dumps(document).encode()

    return edit


def _first(document: Any, key: str) -> Any:
    return next(iter(document[key].values()))


ANY: Mapping[str, Damage] = {
    "empty": _text(b""),
    "cut": lambda sound: sound[: len(sound) // 2],
    "not UTF-8": lambda sound: sound.replace(b'"', b'"\xff', 1),
    "a list": _text(b"[1, 2]"),
    "a number": _text(b"7"),
    "another object": _text(b'{"a": 1}'),
    "nested deeply": _text(b"[" * 200_000),
    "nested deeply in a value": lambda sound: (
        sound.rstrip()[:-1] + b', "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    ),
    "a key twice": lambda sound: sound.replace(b"{", b'{"name": 1, "name": 2, ', 1),
    "NaN": lambda sound: _number(sound, b"NaN"),
    "Infinity": lambda sound: _number(sound, b"Infinity"),
    "an overflowing number": lambda sound: _number(sound, b"1e999"),
    "bytes": _text(bytes(range(256))),
    "UTF-16": lambda sound: sound.decode().encode("utf-16"),
}


def _number(sound: bytes, text: bytes) -> bytes:
    """The first number replaced."""
    document = sound.decode()
    begin = next(i for i, letter in enumerate(document) if letter.isdigit() and document[i - 1] in " :[,")
    end = next(i for i in range(begin, len(document)) if document[i] not in "0123456789.e+-")
    return (document[:begin] + text.decode() + document[end:]).encode()


PLANS: Mapping[str, Damage] = {
    **ANY,
    "a mesh of nothing": _edited(lambda d: d["mesh"].update(shape=[0])),
    "a mesh of negative size": _edited(lambda d: d["mesh"].update(shape=[-8])),
    "a mesh with an axis twice": _edited(lambda d: d["mesh"].update(axis_names=["tp", "tp"], shape=[2, 4])),
    "a mesh of words": _edited(lambda d: d["mesh"].update(shape=["eight"])),
    "no placement": _edited(lambda d: _first(d, "parameters").update(stored=["S(x)"])),
    "a placement too many": _edited(lambda d: _first(d, "parameters").update(stored=["R", "R"])),
    "an entry of another name": _edited(lambda d: _first(d, "parameters").update(stord=["R"])),
    "operators that are a list": _edited(lambda d: d.update(operators=[])),
    "no operators": _edited(lambda d: d.pop("operators")),
    "a negative cost": _edited(lambda d: d.update(objective_seconds=-1.0)),
    "a gap in words": _edited(lambda d: d.update(gap="none")),
    "no micro-batches": _edited(lambda d: d.update(micro_batches=0)),
    "half a micro-batch": _edited(lambda d: d.update(micro_batches=0.5)),
    "a schema of the future": _edited(lambda d: d.update(schema_version=99)),
    "a schema in words": _edited(lambda d: d.update(schema_version="two")),
    "a prediction of another type": _edited(lambda d: d.update(predicted=[1, 2])),
    "a negative prediction": _edited(lambda d: d["predicted"].update(step_seconds=-1.0)),
    "a precision that is none": _edited(lambda d: d.update(precision="fp3")),
    "a null in place of the mesh": _edited(lambda d: d.update(mesh=None)),
}


def _load_plan(damage: Damage, scene: Scene) -> None:
    path = _written(scene, damage(sound_plan()), "plan.json")
    plan = Plan.load(path)
    assert plan.summary()


def _written(scene: Scene, content: bytes, name: str) -> Path:
    path = scene.folder / name
    path.write_bytes(content)
    scene.protect(path)
    return path


def _show_plan(damage: Damage, scene: Scene) -> None:
    command("show", _written(scene, damage(sound_plan()), "plan.json"))


PLAN_FILES: tuple[Fault, ...] = tuple(
    make_fault(16, f"plan {name}".replace(" ", "_"), f"a plan file is damaged: {name}", partial(_load_plan, damage),
               words=("plan.json",))
    for name, damage in PLANS.items()
)  # fmt: skip

SHOWN_PLANS: tuple[Fault, ...] = tuple(
    make_fault(16, f"show {name}".replace(" ", "_"), f"autopar show is given a damaged plan: {name}",
               partial(_show_plan, PLANS[name]), words=("plan.json",))
    for name in ("empty", "cut", "not UTF-8", "nested deeply", "NaN", "a mesh of nothing", "no operators")
)  # fmt: skip


def _compile_with(damage: Damage, scene: Scene) -> None:
    """Only rank 1 has the damaged file; every rank must hear of it."""
    sound = _plan_for(scene)
    path = _written(scene, damage(sound) if scene.rank == scene.processes - 1 else sound, f"plan-{scene.rank}.json")
    autopar.compile(Net(), batch(), plan=path)


def _plan_for(scene: Scene) -> bytes:
    if scene.processes == 2:
        return sound_pipeline()
    return autopar.plan(Net(), batch(), cluster=f"{scene.processes} cpu", mode="fast", dims=scene.dims).to_json()


DAMAGED_ON_ONE: tuple[Fault, ...] = tuple(
    make_fault(16, f"damaged on one {name}".replace(" ", "_"), f"the plan file of the last rank is damaged: {name}",
               partial(_compile_with, PLANS[name]), layout=layout, words=(r"plan-\d.json|rank",))
    for layout in ("pp2", "shard4")
    for name in ("cut", "empty", "no operators", "a mesh of nothing", "another object")
)  # fmt: skip


def _cluster_document() -> bytes:
    return msgspec.json.encode(autopar.Cluster.parse("2x8 H100-SXM"))


def _set(path: str, value: object) -> Damage:
    def change(document: Any) -> None:
        *above, last = path.split(".")
        for name in above:
            document = document[name]
        document[last] = value

    return _edited(change)


CLUSTERS: Mapping[str, Damage] = {
    **ANY,
    "no nodes": _set("num_nodes", 0),
    "negative nodes": _set("num_nodes", -2),
    "half a node": _set("num_nodes", 1.5),
    "no devices": _set("devices_per_node", 0),
    "a billion nodes": _set("num_nodes", 10**9),
    "no memory": _set("device.memory_bytes", 0),
    "negative memory": _set("device.memory_bytes", -1),
    "no launch": _set("device.launch_seconds", 0),
    "a negative launch": _set("device.launch_seconds", -1e-6),
    "no bandwidth": _set("inter_link.bytes_per_second", 0),
    "negative bandwidth inside": _set("intra_link.bytes_per_second", -1),
    "a backend that is none": _set("collective_backend", "smoke"),
    "a device in words": _set("device", "H100"),
    "a link that is a list": _set("intra_link", []),
}


def _load_cluster(damage: Damage, scene: Scene) -> None:
    path = _written(scene, damage(_cluster_document()), "cluster.json")
    autopar.plan(Net(), batch(), cluster=str(path), mode="fast")


CLUSTER_FILES: tuple[Fault, ...] = tuple(
    make_fault(16, f"cluster {name}".replace(" ", "_"), f"a cluster file is damaged: {name}",
               partial(_load_cluster, damage), words=("cluster.json",))
    for name, damage in CLUSTERS.items()
)  # fmt: skip


def _log() -> bytes:
    step = {"seconds": 0.4, "exposed_communication_seconds": 0.1, "peak_bytes": 10**9}
    return "".join(json.dumps({"step": i, **step, "predicted": step}) + "\n" for i in range(6)).encode()


LOGS: Mapping[str, Damage] = {
    **{
        name: ANY[name]
        for name in ("empty", "not UTF-8", "a list", "a number", "another object", "nested deeply", "NaN")
    },
    "negative seconds": lambda sound: sound.replace(b"0.4", b"-0.4"),
    "no seconds": lambda sound: sound.replace(b"0.4", b"0.0"),
    "seconds in words": lambda sound: sound.replace(b"0.4", b'"long"'),
    "a line cut": lambda sound: sound[:-20],
}


def _calibrate(damage: Damage, scene: Scene) -> None:
    log = _written(scene, damage(_log()), "run.jsonl")
    cluster = _written(scene, _cluster_document(), "cluster.json")
    command("calibrate", cluster, log, "-o", scene.folder / "new.json")


LOG_FILES: tuple[Fault, ...] = tuple(
    make_fault(16, f"log {name}".replace(" ", "_"), f"a log of steps is damaged: {name}", partial(_calibrate, damage),
               words=("run.jsonl",))
    for name, damage in LOGS.items()
)  # fmt: skip


def _profiled(damage: Damage, scene: Scene) -> None:
    path = _written(scene, damage(b'{"device": "H100", "points": []}'), "profile.json")
    command("plan", MODEL, *ON, "--profile", path)


PROFILES: tuple[Fault, ...] = tuple(
    make_fault(16, f"profile {name}".replace(" ", "_"), f"a profile of kernels is damaged: {name}",
               partial(_profiled, ANY[name]), words=("profile.json",))
    for name in ("empty", "not UTF-8", "a list", "another object", "nested deeply", "bytes")
)  # fmt: skip


CONFIGURATIONS: Mapping[str, tuple[str, str, bytes]] = {
    "TOML that is none": ("torchtitan", "job.toml", b"a = ["),
    "TOML in another encoding": ("torchtitan", "job.toml", b"[parallelism]\nx = \"\xff\""),
    "TOML with a degree in words": ("torchtitan", "job.toml", b'[parallelism]\ntensor_parallel_degree = "two"'),
    "TOML with a negative degree": ("torchtitan", "job.toml", b"[parallelism]\ntensor_parallel_degree = -2"),
    "TOML with a degree of nothing": ("torchtitan", "job.toml", b"[parallelism]\ntensor_parallel_degree = 0"),
    "TOML with a huge degree": ("torchtitan", "job.toml", b"[parallelism]\ntensor_parallel_degree = 1000000000"),
    "TOML with a degree that is NaN": ("torchtitan", "job.toml", b"[parallelism]\ntensor_parallel_degree = nan"),
    "TOML with a table for a number": ("torchtitan", "job.toml", b"[parallelism.tensor_parallel_degree]\na = 1"),
    "TOML with a list of tables": ("torchtitan", "job.toml", b"[[parallelism]]\na = 1"),
    "TOML nested deeply": ("torchtitan", "job.toml", b"a = " + b"[" * 50_000),
    "flags without numbers": ("megatron", "flags.sh", b"--tensor-model-parallel-size three"),
    "flags with a negative number": ("megatron", "flags.sh", b"--tensor-model-parallel-size -4"),
    "flags that end": ("megatron", "flags.sh", b"--tensor-model-parallel-size"),
    "flags with an open quote": ("megatron", "flags.sh", b"--tensor-model-parallel-size '2"),
    "flags that are bytes": ("megatron", "flags.sh", bytes(range(256))),
    "flags that do not divide": ("megatron", "flags.sh", b"--tensor-model-parallel-size 3"),
    "JSON that is none": ("deepspeed", "ds.json", b"{"),
    "JSON that is a list": ("deepspeed", "ds.json", b"[]"),
    "JSON with a stage of nine": ("deepspeed", "ds.json", b'{"zero_optimization": {"stage": 9}}'),
    "JSON with a stage in words": ("deepspeed", "ds.json", b'{"zero_optimization": {"stage": "three"}}'),
    "JSON with a batch that is NaN": ("deepspeed", "ds.json", b'{"train_batch_size": NaN}'),
    "JSON with a negative batch": ("deepspeed", "ds.json", b'{"train_batch_size": -8}'),
    "JSON nested deeply": ("deepspeed", "ds.json", b'{"zero_optimization": ' + b"[" * 100_000),
    "JSON with a key twice": ("deepspeed", "ds.json", b'{"train_batch_size": 8, "train_batch_size": 16}'),
    "YAML that is none": ("accelerate", "job.yaml", b"a: [\n"),
    "YAML that is a list": ("accelerate", "job.yaml", b"- 1\n"),
    "YAML in another encoding": ("accelerate", "job.yaml", b"a: \xff\n"),
    "YAML with a number of processes in words": ("accelerate", "job.yaml", b"num_processes: eight\n"),
    "YAML that refers to itself": ("accelerate", "job.yaml", b"a: &a [*a]\n"),
    "YAML that multiplies": (
        "accelerate", "job.yaml",
        b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n".encode() for i in range(1, 9)),
    ),
}  # fmt: skip


def _import(tool: str, name: str, content: bytes, scene: Scene) -> None:
    path = _written(scene, content, name)
    command("import", path, "--from", tool, "--model", MODEL, "--cluster", "8 H100-SXM", "--batch", "8", "--seq", "8")


IMPORTED: tuple[Fault, ...] = tuple(
    make_fault(16, f"import of {name}".replace(" ", "_"), f"autopar import reads a configuration: {name}",
               partial(_import, tool, file, content), words=(file,), right="refers" in name or "multiplies" in name)
    for name, (tool, file, content) in CONFIGURATIONS.items()
)  # fmt: skip


@fault(16, "a plan is read from a pipe, a device, a folder", words=("folder|directory",))
def plan_is_a_folder(scene: Scene) -> None:
    (scene.folder / "folder").mkdir()
    Plan.load(scene.folder / "folder")


@fault(16, "a trace for the report is damaged", words=("step.json",))
def damaged_trace(scene: Scene) -> None:
    (scene.folder / "plan.json").write_bytes(sound_plan())
    (scene.folder / "step.json").write_text('{"traceEvents": [{"ph": "X", "ts": "soon"}]}')
    command("report", "plan.json", "--trace", "step.json", "-o", "plan.html")


@fault(16, "a configuration of Hugging Face is damaged", words=("config.json",))
def damaged_configuration(scene: Scene) -> None:
    (scene.folder / "config.json").write_bytes(b'{"architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}')
    command("plan", "hf:config.json", *ON)

"""Point 14: files that name code. Reading, showing, comparing and simulating must not run it."""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from autopar.plans.parallel_plan import Plan
from benchmarks.faults.fault import Fault, RefusedByCommand, Scene, Wrong, fault, make_fault
from benchmarks.faults.victims import MODEL, ON, command, sound_plan

CODE = "open('ran', 'w').close()\n\n\ndef make(*args, **options):\n    raise ValueError('ran')\n"

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "show": ("show", "plan.json"),
    "show --code": ("show", "plan.json", "--code", "0"),
    "explain": ("explain", "plan.json", "head.weight"),
    "explain --vs": ("explain", "plan.json", "--vs", "fsdp"),
    "memory": ("memory", "plan.json"),
    "what-if": ("what-if", "plan.json", "--memory-limit", "1GB"),
    "edit": ("edit", "plan.json", "--set", "head.weight=R", "-o", "edited.json"),
    "diff": ("diff", "plan.json", "sound.json"),
    "report": ("report", "plan.json", "-o", "plan.html"),
    "report --simulate": ("report", "plan.json", "--simulate", "-o", "plan.html"),
    "simulate": ("simulate", "plan.json", "--trace", "step.json"),
    "export": ("export", "plan.json", "--to", "torchtitan"),
    "export to code": ("export", "plan.json", "--to", "fsdp2", "-o", "sharded.py"),
    "export --price": ("export", "plan.json", "--to", "torchtitan", "--price"),
}


def _planted(folder: Path, **question: object) -> None:
    (folder / "planted.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    document = json.loads(sound_plan())
    (folder / "sound.json").write_bytes(sound_plan())
    document["question"] = {**document["question"], **question}
    (folder / "plan.json").write_text(json.dumps(document))


def _expect_unrun(folder: Path) -> None:
    if (folder / "ran").exists() or "planted" in sys.modules:
        raise Wrong("the code that the file names was run")


def _named_code(words: tuple[str, ...], scene: Scene) -> None:
    _planted(scene.folder, model="planted:make")
    try:
        command(*words)
    finally:
        _expect_unrun(scene.folder)


READING: tuple[Fault, ...] = tuple(
    make_fault(14, name.replace(" ", "_"), f"autopar {name} is given a plan that names its model as code",
               partial(_named_code, words), right=True, words=("--trust",))
    for name, words in COMMANDS.items()
)  # fmt: skip


def _abort(words: tuple[str, ...], scene: Scene) -> None:
    _planted(scene.folder, model="os:abort")
    command(*words)


ABORTING: tuple[Fault, ...] = tuple(
    make_fault(14, f"{name} of os:abort", f"autopar {name} is given a plan whose model is os:abort",
               partial(_abort, COMMANDS[name]), right=True, words=("--trust",))
    for name in ("memory", "simulate", "report")
)  # fmt: skip


@fault(14, "the cluster that a plan names is a file elsewhere", right=True, words=("cluster|nowhere",))
def cluster_elsewhere(scene: Scene) -> None:
    _planted(scene.folder, cluster_text="/etc/passwd.json")
    command("memory", "plan.json", "--trust", "--model", MODEL)


@fault(14, "a configuration asks for code of its repository", right=True, words=("config.json|planted",))
def remote_code(scene: Scene) -> None:
    _planted(scene.folder)
    (scene.folder / "config.json").write_text(json.dumps({
        "architectures": ["PlantedForCausalLM"], "model_type": "planted",
        "auto_map": {"AutoConfig": "planted.make", "AutoModelForCausalLM": "planted.make"},
    }))  # fmt: skip
    try:
        command("plan", "hf:config.json", *ON)
    finally:
        _expect_unrun(scene.folder)


@fault(14, "a configuration names an attribute of transformers that is no model", words=("config.json|architecture",))
def no_architecture(scene: Scene) -> None:
    (scene.folder / "config.json").write_text(json.dumps({"architectures": ["logging"], "model_type": "gpt2"}))
    command("plan", "hf:config.json", *ON)


class _Pickled:
    def __reduce__(self) -> tuple[object, ...]:
        return (open, ("ran", "w"))


@fault(14, "a plan file is a pickle", words=("plan.json",))
def pickled_plan(scene: Scene) -> None:
    (scene.folder / "plan.json").write_bytes(pickle.dumps(_Pickled()))
    try:
        Plan.load(scene.folder / "plan.json")
    finally:
        _expect_unrun(scene.folder)


@fault(14, "rules show is given Python instead of an operator", words=("operator",))
def code_as_operator(scene: Scene) -> None:
    try:
        command("rules", "show", "__import__('pathlib').Path('ran').touch()")
    finally:
        _expect_unrun(scene.folder)


@fault(14, "rules discover is given an example that opens a file", words=("example",))
def code_as_example(scene: Scene) -> None:
    try:
        command("rules", "discover", "aten::mm", "--example", "open('ran', 'w')")
    finally:
        _expect_unrun(scene.folder)


@fault(14, "rules discover is given an example that imports", words=("example",))
def import_as_example(scene: Scene) -> None:
    try:
        command("rules", "discover", "aten::mm", "--example", "__import__('os').system('touch ran')")
    finally:
        _expect_unrun(scene.folder)


TAGS = {
    "accelerate": ("job.yaml", "fsdp_config: !!python/object/apply:os.system ['touch ran']\n"),
    "deepspeed": ("job.json", "{\"zero_optimization\": \"__import__('os').system('touch ran')\"}"),
    "megatron": ("flags.sh", "--tensor-model-parallel-size $(touch ran)\n"),
}


def _imported(tool: str, scene: Scene) -> None:
    name, text = TAGS[tool]
    (scene.folder / name).write_text(text)
    try:
        command("import", name, "--from", tool, "--model", MODEL, "--cluster", "8 H100-SXM")
    finally:
        _expect_unrun(scene.folder)


IMPORTS: tuple[Fault, ...] = tuple(
    make_fault(14, f"import of {tool} with code", f"a configuration of {tool} holds code",
               partial(_imported, tool), words=(TAGS[tool][0],))
    for tool in TAGS
)  # fmt: skip


@fault(14, "--trust runs what the file names, and only then", right=True)
def trusted(scene: Scene) -> None:
    _planted(scene.folder, model="planted:make")
    with contextlib.suppress(RefusedByCommand, RuntimeError, ValueError):
        command("memory", "plan.json", "--trust")
    if not (scene.folder / "ran").exists():
        raise Wrong("--trust does not run the factory")

"""Files that something damaged: every loader says so by a ConfigurationError, whatever stands where.

Values of all kinds take the place of others, entries vanish, appear twice or change their names, bytes flip, files end
early; numbers that JSON does not know, keys that stand twice, deep nesting.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig

from autopar.capture import load_model
from autopar.cli.calibrate_command import read_profile
from autopar.cost_models.machine_profile import load_profile as load_machine_profile
from autopar.cost_models.refit import read_steps, tiers_of
from autopar.errors import ConfigurationError
from autopar.exporters.uniform import UniformPlan
from autopar.exporters.written_configurations import configuration
from autopar.files import MOST_BYTES, decoded_json, decoded_text, file_content
from autopar.hardware.cluster import Cluster
from autopar.hardware.operator_profile import MeasuredKernel, OperatorProfile, load_profile
from autopar.importers.read_configurations import plan_options, read_configuration
from autopar.plans.parallel_plan import Plan
from autopar.report.html.timeline import read_timeline
from autopar.report.measured import read_measured
from autopar.rules.discovery import read_discovery
from tests.capture.small_models import SIZES
from tests.cost_models.test_job_profile import PROFILE as JOB
from tests.cost_models.test_machine_profile import PROFILE as MACHINE
from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import pipeline_plan
from tests.plans.test_plan_text import small_plan

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 3, 0.5, -0.5, 1e300, 10**30, "", "R", "S(99)", "é", "x" * 100, [], {}, [[]], [None], {"a": 1},
    ["R", "R", "R", "R"],
)  # fmt: skip
TRIES = 100
OPERATORS = Cluster.parse("8 H100-SXM")
KERNELS = OperatorProfile(
    name="mine", device="NVIDIA H100 80GB HBM3", versions={"torch": "2.13"}, date="2026-01-01T00:00:00+00:00",
    kernels=(MeasuredKernel(kind="gemm", dtype="bfloat16", sizes=(64.0, 64.0, 64.0, 1.0), seconds=1e-5),),
)  # fmt: skip


def _read_plan(path: Path) -> None:
    plan = Plan.load(path)
    assert plan.summary()
    assert plan.to_json()
    assert plan.num_ranks > 0
    assert not plan.diff(plan)


def _import(tool: str) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        text = decoded_text(file_content(path, str(path)), str(path))
        return plan_options(read_configuration(text, tool, num_devices=8, origin=str(path)))

    return read


READERS: dict[str, Callable[[Path], object]] = {
    "plan": _read_plan,
    "cluster": lambda path: Cluster.from_file(path).fingerprint,
    "operator profile": lambda path: OPERATORS.with_operator_profile(load_profile(path)).fingerprint,
    "machine profile": load_machine_profile,
    "job profile": lambda path: read_profile(path).fingerprint,
    "log of steps": lambda path: tiers_of(read_steps(path)),
    "trace": read_timeline,
    "measured trace": lambda path: read_measured(path, 0),
    "discovered rule": lambda path: read_discovery(path, "aten.triu.default"),
    "deepspeed": _import("deepspeed"),
    "torchtitan": _import("torchtitan"),
    "accelerate": _import("accelerate"),
    "megatron": _import("megatron"),
    "hf configuration": lambda path: load_model(f"hf:{path}", 2, 8),
}
EVENTS = (
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "compute"}},
    {"ph": "X", "name": "ProfilerStep#1", "cat": "user_annotation", "pid": 0, "tid": 1, "ts": 1.0, "dur": 9.0},
    {"ph": "X", "name": "mm", "cat": "cpu_op", "pid": 0, "tid": 1, "ts": 2.0, "dur": 3.0},
    {"ph": "C", "name": "memory", "pid": 0, "ts": 1.0, "args": {"bytes": 5}},
)
STEP = {
    "seconds": 0.5, "exposed_communication_seconds": 0.1,
    "predicted": {"seconds": 0.4, "exposed_communication_seconds": 0.1},
}  # fmt: skip
UNIFORM = UniformPlan(dp_replicate=2, dp_shard=2, tp=2, zero_stage=3, batch=64, sequence=128, precision="bf16")


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """A sound document of each kind."""
    plan = pipeline_plan("gpt2", CASES["gpt2"].halves, "1f1b", 2, {"tp": 2})
    exported = {
        tool: configuration(small_plan(), replace(UNIFORM, sequence_parallel=tool == "megatron"), tool).text
        for tool in ("torchtitan", "deepspeed", "accelerate", "megatron")
    }
    return {
        "plan": json.loads(plan.to_json()),
        "cluster": json.loads(msgspec.json.encode(Cluster.parse("1x8 H100-SXM + 2x8 A100-80"))),
        "operator profile": plain_json(KERNELS),
        "machine profile": plain_json(MACHINE),
        "job profile": plain_json(JOB),
        "log of steps": [STEP] * 4,
        "trace": {"traceEvents": EVENTS},
        "measured trace": {"traceEvents": EVENTS},
        "discovered rule": {"operator": "aten.triu.default", "rule": "b a _ -> b a _", "trials": 2, "crashes": 0},
        "deepspeed": json.loads(exported["deepspeed"]),
        "torchtitan": msgspec.toml.decode(exported["torchtitan"]),
        "accelerate": msgspec.yaml.decode(exported["accelerate"]),
        "megatron": exported["megatron"].split(),
        "hf configuration": {**LlamaConfig(**SIZES).to_dict(), "architectures": ["LlamaForCausalLM"]},
    }


def plain_json(record: object) -> Any:
    return json.loads(msgspec.json.encode(record))


def _encoded(name: str, document: Any) -> bytes:
    """The file of a document, as its reader takes it. What a language has no word for is left as JSON."""
    text = json.dumps(document)
    if name == "log of steps" and isinstance(document, list):
        text = "\n".join(json.dumps(line) for line in document)
    elif name == "megatron" and isinstance(document, list):
        text = " ".join(str(word) for word in document)
    elif name == "torchtitan" and all(isinstance(table, dict) for table in document.values()):
        lines = [[f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in document[table].items())] for table in document]
        text = "\n".join(itertools.chain(*lines))
    return text.encode()


@pytest.mark.parametrize("name", READERS)
def test_what_is_sound_is_read(name: str, documents: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(_encoded(name, documents[name]))
    READERS[name](tmp_path / "file.json")


@pytest.mark.parametrize("name", READERS)
def test_what_is_damaged_is_refused_in_our_words(name: str, documents: dict[str, Any], tmp_path: Path) -> None:
    draw, refused, tries = random.Random(7), 0, 30 if name == "hf configuration" else TRIES
    for _ in range(tries):
        (tmp_path / "file.json").write_bytes(_damaged(name, documents[name], draw))
        try:
            READERS[name](tmp_path / "file.json")
        except ConfigurationError:
            refused += 1
    assert refused > tries // 5


def _damaged(name: str, document: Any, draw: random.Random) -> bytes:
    """The document after one or two changes, or with a wrong byte or end."""
    changed = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2))):
        _change(changed, draw)
    content = bytearray(_encoded(name, changed))
    if draw.random() < 0.1:
        content[draw.randrange(len(content))] = draw.randrange(256)
    elif draw.random() < 0.1:
        del content[draw.randrange(len(content)) :]
    return bytes(content)


def _change(document: Any, draw: random.Random) -> None:
    path = draw.choice([path for path in _paths(document, ()) if path] or [()])
    if not path:
        return
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    kind = draw.random()
    if kind < 0.15:
        del owner[path[-1]]
    elif kind < 0.25 and isinstance(owner, dict):
        owner[draw.choice(("new", "é", ""))] = owner.pop(path[-1])
    elif kind < 0.35 and isinstance(owner, list):
        owner.append(owner[path[-1]])
    else:
        owner[path[-1]] = draw.choice(ODD)


def _paths(value: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield above
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*above, key))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": NaN}', "NaN is no finite number"),
        (b'{"a": 1e999}', "1e999 is no finite number"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' stands twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "byte 7 is no UTF-8"),
        (b"{", "is damaged"),
        (b" " * (MOST_BYTES + 1), "more than the 100,000,000 bytes that are read"),
    ],
)
def test_json_that_two_readers_could_take_differently_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        decoded_json(content, "the file")


@pytest.mark.parametrize(
    ("entry", "value"),
    [("num_nodes", 0), ("device.memory_bytes", -1), ("device.launch_seconds", 0), ("inter_link.bytes_per_second", 0)],
)
def test_a_cluster_has_positive_numbers(entry: str, value: float, tmp_path: Path) -> None:
    document = json.loads(msgspec.json.encode(Cluster.parse("2x8 H100-SXM")))
    *above, last = entry.split(".")
    owner = document
    for name in above:
        owner = owner[name]
    owner[last] = value
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match=rf"cluster.json.*{entry} is {value}"):
        Cluster.from_file(tmp_path / "cluster.json")


def test_a_cluster_of_a_billion_nodes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="8,000,000,000 devices, more than the 1,048,576"):
        Cluster.parse("1000000000x8 H100-SXM")


@pytest.mark.parametrize("count", [0, 10**9])
def test_numbers_of_micro_batches_have_bounds(count: int, documents: dict[str, Any]) -> None:
    content = json.dumps({**documents["plan"], "micro_batches": count}).encode()
    with pytest.raises(ConfigurationError, match=f"micro_batches is {count}; .* in at most 16,384"):
        Plan.from_json(content)

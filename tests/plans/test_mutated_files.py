"""Files that something damaged: every loader says so by a ConfigurationError, whatever stands where.

Values of all kinds take the place of others, entries vanish, appear twice or change their names, bytes flip, files end
early; numbers that JSON does not know, keys that stand twice, deep nesting.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autopar.cost_models.machine_profile import load_profile as load_machine_profile
from autopar.cost_models.refit import read_steps
from autopar.errors import ConfigurationError
from autopar.files import MOST_BYTES, decoded_json
from autopar.hardware.cluster import Cluster
from autopar.hardware.operator_profile import load_profile
from autopar.plans.parallel_plan import Plan
from autopar.report.html.timeline import read_timeline
from autopar.report.measured import read_measured
from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import pipeline_plan

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 3, 0.5, -0.5, 1e300, 10**30, "", "R", "S(99)", "é", "x" * 100, [], {}, [[]], [None], {"a": 1},
    ["R", "R", "R", "R"],
)  # fmt: skip
TRIES = 250


def _read_plan(path: Path) -> None:
    plan = Plan.load(path)
    assert plan.summary()
    assert plan.to_json()
    assert plan.num_ranks > 0
    assert not plan.diff(plan)


READERS: dict[str, Callable[[Path], object]] = {
    "plan": _read_plan,
    "cluster": lambda path: Cluster.from_file(path).fingerprint,
    "operator profile": load_profile,
    "machine profile": load_machine_profile,
    "log of steps": read_steps,
    "trace": read_timeline,
    "measured trace": lambda path: read_measured(path, 0),
}


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """A sound plan, cluster and trace; profiles and logs are only tried with a cluster that was damaged."""
    plan = pipeline_plan("gpt2", CASES["gpt2"].halves, "1f1b", 2, {"tp": 2})
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "compute"}},
        {"ph": "X", "name": "ProfilerStep#1", "cat": "user_annotation", "pid": 0, "tid": 1, "ts": 1.0, "dur": 9.0},
        {"ph": "X", "name": "mm", "cat": "cpu_op", "pid": 0, "tid": 1, "ts": 2.0, "dur": 3.0},
        {"ph": "C", "name": "memory", "pid": 0, "ts": 1.0, "args": {"bytes": 5}},
    ]
    found = {
        "plan": json.loads(plan.to_json()),
        "cluster": json.loads(msgspec.json.encode(Cluster.parse("1x8 H100-SXM + 2x8 A100-80"))),
        "trace": {"traceEvents": events},
    }
    found["measured trace"] = found["trace"]
    return {name: found.get(name, found["cluster"]) for name in READERS}


@pytest.mark.parametrize("name", ["plan", "cluster", "trace", "measured trace"])
def test_what_is_sound_is_read(name: str, documents: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(json.dumps(documents[name]))
    READERS[name](tmp_path / "file.json")


@pytest.mark.parametrize("name", READERS)
def test_what_is_damaged_is_refused_in_our_words(name: str, documents: dict[str, Any], tmp_path: Path) -> None:
    draw, refused = random.Random(7), 0
    for _ in range(TRIES):
        content = _damaged(documents[name], draw)
        (tmp_path / "file.json").write_bytes(content)
        try:
            READERS[name](tmp_path / "file.json")
        except ConfigurationError:
            refused += 1
    assert refused > TRIES // 4


def _damaged(document: Any, draw: random.Random) -> bytes:
    """The document after one or two changes, or with a wrong byte or end."""
    changed = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2))):
        _change(changed, draw)
    content = bytearray(json.dumps(changed).encode())
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

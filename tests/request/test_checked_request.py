"""What a user asks is checked where it is written down, before a model is captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.planner.planning import make_plan
from autopar.request import Request
from tests.planner.problems import captured_mlp

NODE = Cluster.parse("8 H100-SXM")
MIXED = Cluster.parse("1x8 H100-SXM + 1x8 A100-80")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"mode": "slow"}, "mode='slow': write one of fast, default, max"),
        ({"time_limit": 0.0}, r"time_limit=0\.0: write seconds"),
        ({"precision": "fp4"}, "precision='fp4'"),
        ({"precision": "bfloat16"}, 'did you mean "bf16"'),
        ({"mode": "defualt"}, 'did you mean "default"'),
        ({"recompute": "fulll"}, 'did you mean "full"'),
        ({"dims": {"pp": 2}, "schedule": "1f1B"}, 'did you mean "1f1b"'),
        ({"dims": {"pp": 2, "dp_shrad": 2}}, "unknown axis 'dp_shrad'"),
        ({"dims": {"pp": 2, "tp": 3}}, "do not divide 4 devices"),
        ({"recompute": "some"}, "the plan: recompute='some'; write one of none, selective, full"),
        ({"memory_limit": "many"}, "memory_limit='many': write bytes"),
        ({"memory_limit": -1.0}, "must be positive"),
        ({"memory_limit": float("inf")}, "must be positive and finite"),
        ({"memory_limit": "0B"}, "must be positive"),
        ({"memory_limit": True}, "write bytes"),
        ({"memory_limit": 10**400}, "write bytes"),
        ({"memory_limit": ["1GiB"]}, "write bytes"),
        ({"constraints": {"lm_head": {}}}, "constraint 'lm_head' is empty"),
        ({"mesh": (3, 2)}, "8"),
        ({"dims": {"tp": 3}}, "8"),
        ({"mesh": (8,), "dims": {"tp": 8}}, "not both"),
        ({"dims": {"pp": 3}}, "pp=3 cuts 8 devices"),
        ({"schedule": "1f1b"}, "needs stages"),
        ({"cluster": MIXED, "mesh": (16,)}, "devices of several kinds"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, Any], words: str) -> None:
    request = Request(cluster=NODE)
    with pytest.raises(ConfigurationError, match=words):
        replace(request, **asked)


def test_the_question_in_a_plan_is_what_was_asked_and_how_it_was_understood() -> None:
    program = captured_mlp(batch=8, width=16)
    request = Request(cluster=Cluster.parse("2 H100-SXM"), dims={"dp_shard": 2}, mode="fast", with_baselines=False)
    question = make_plan(program, request).question
    assert question["dims"] == {"dp_shard": 2}
    assert (question["mesh"], question["constraints"], question["micro_batches"]) == (None, None, None)
    assert (question["optimizer"], question["optimizer_assumed"], question["mode"]) == ("AdamW", True, "fast")
    assert question["cluster_fingerprint"] == request.cluster.fingerprint

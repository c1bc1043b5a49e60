"""Older plan files: one that an older autopar wrote is read, saved as today's version, and means what it meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.errors import ConfigurationError
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_versions import CONVERSIONS, SCHEMA_VERSION, current

OLD = Path(__file__).parent.parent / "data" / "plan_version_1.json"
"""Two linear layers on a mesh (2, 2), planned before collectives were joined and started early."""


def test_a_file_of_version_1_loads_as_it_was_meant() -> None:
    document = json.loads(OLD.read_text())
    assert document["schema_version"] == 1
    assert "bucket_bytes" not in document
    plan = Plan.load(OLD)
    assert plan.bucket_bytes is None  # a file of today that leaves the field out says {}: collectives start early
    assert set(plan.parameters) == set(document["parameters"])
    assert plan.predicted.peak_bytes == document["predicted"]["peak_bytes"]
    again = json.loads(plan.to_json())
    assert again["schema_version"] == SCHEMA_VERSION
    assert Plan.from_json(plan.to_json()) == plan


def test_what_a_file_says_is_not_converted() -> None:
    assert current({"schema_version": 1, "bucket_bytes": {}}, "plan")["bucket_bytes"] == {}
    assert "bucket_bytes" not in current({"schema_version": SCHEMA_VERSION}, "plan")


def test_kernels_of_version_2_stood_for_no_operators_of_the_plan() -> None:
    assert current({"schema_version": 2, "kernels": ["rms_norm"]}, "plan")["kernels"] == []
    assert current({"schema_version": SCHEMA_VERSION, "kernels": ["rms_norm"]}, "plan")["kernels"] == ["rms_norm"]


def test_every_older_version_has_its_conversions() -> None:
    assert set(CONVERSIONS) == set(range(1, SCHEMA_VERSION))


@pytest.mark.parametrize("version", [None, 0, "2", True, 1.5])
def test_what_is_no_version_is_refused(version: object) -> None:
    with pytest.raises(
        ConfigurationError, match=f'has schema version {version}: a plan file begins with "schema_version"'
    ):
        current({"schema_version": version}, "plan")


def test_a_newer_version_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"comes from a newer autopar; install that one .* or plan again"):
        current({"schema_version": SCHEMA_VERSION + 1}, "plan")

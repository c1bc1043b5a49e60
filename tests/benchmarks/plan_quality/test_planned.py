"""Plans of the benchmark's settings are made once, and again once what they follow from has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from benchmarks.plan_quality import planned
from benchmarks.plan_quality.models import Pair
from benchmarks.plan_quality.settings import Setting, vectors

CLUSTER = Cluster.parse("4x1 cpu @ 0.2Gb")
TINY = Setting(preset="flat-200mbit", build=lambda: Pair(8, 16), inputs=vectors(8, 8))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A setting whose three plans take a second; the cache is empty."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(planned, "SETTINGS", {"tiny": TINY})
    return "tiny"


def test_plans_are_found_as_they_were_made_and_only_for_their_cluster(tiny: str) -> None:
    planned.make(tiny, CLUSTER)
    found = planned.load(tiny, CLUSTER)
    assert "autopar" in found.plans
    assert set(found.predicted) == set(found.plans)
    assert found.predicted["autopar"]["seconds"] == found.plans["autopar"].predicted.step_seconds
    assert planned.make_missing({tiny: CLUSTER}, Console()) == {}, "nothing is missing"
    with pytest.raises(AutoparError, match="tiny has no plans"):
        planned.load(tiny, Cluster.parse("4x1 cpu @ 0.1Gb"))


def test_other_source_asks_for_other_plans(tiny: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    monkeypatch.setattr(planned, "_sources", lambda: [source])
    source.write_text("1")
    planned.make(tiny, CLUSTER)
    planned.load(tiny, CLUSTER)
    source.write_text("2")
    with pytest.raises(AutoparError, match="tiny has no plans"):
        planned.load(tiny, CLUSTER)


def test_a_setting_that_cannot_be_planned_is_named(tiny: str) -> None:
    assert "tiny" in planned.make_missing({tiny: CLUSTER}, Console(quiet=True))["tiny"], "no such setting elsewhere"

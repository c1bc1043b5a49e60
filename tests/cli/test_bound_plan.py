"""What a command takes from a plan file."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.cli.bound_plan import cluster_of
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster


def plan_on(name: str, ranks: int) -> Any:
    return cast(Any, SimpleNamespace(cluster=name, num_ranks=ranks))


def test_a_plan_made_on_this_machine_is_read_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is that of its profile, and describes no cluster."""
    here = replace(Cluster.parse("2 cpu"), name="amd-epyc-2-cores")
    monkeypatch.setattr(Cluster, "detect", lambda ranks: here)
    assert cluster_of(plan_on(here.name, 2), {}, {}) is here


def test_the_name_of_another_machine_says_what_to_give() -> None:
    with pytest.raises(ConfigurationError, match=r"'risc-v-64-cores', which is not this machine.*give --cluster"):
        cluster_of(plan_on("risc-v-64-cores", 2), {}, {})
    assert cluster_of(plan_on("risc-v-64-cores", 2), {}, {"cluster": "2 H100-SXM"}).num_devices == 2


def test_a_cluster_that_a_plan_describes_is_read_from_its_name() -> None:
    assert cluster_of(plan_on("1x8 H100-SXM", 8), {}, {}).num_devices == 8

"""What `dims` and `schedule` ask of a pipeline, and what is refused before a model is captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.request.pipeline_request import check_stages, pipeline_request


def test_wishes() -> None:
    assert pipeline_request(Cluster.parse("4 H100-SXM"), None, {"tp": 2}, None) is None
    assert pipeline_request(Cluster.parse("4 H100-SXM"), None, {"pp": 1, "tp": 2}, None) is None
    asked = pipeline_request(Cluster.parse("8 H100-SXM"), None, {"pp": -1, "tp": 2}, "zb-h1")
    assert asked is not None
    assert (asked.num_groups, asked.dims, asked.family) == (4, {"tp": 2}, "zb-h1")
    for dims, schedule, words in (
        ({"pp": -3}, None, "size -3"),
        (None, "1f1b", "needs stages"),
        ({"pp": 2}, "x", "one of"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            pipeline_request(Cluster.parse("4 H100-SXM"), None, dims, schedule)


class NeverRun(nn.Module):
    """A model whose capture would be seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model was captured")


@pytest.mark.parametrize(
    ("dims", "schedule", "words"),
    [
        ({"pp": 9}, None, "pp=9 cuts 8 devices in nodes of 8 into no equal groups .*write one of 1, 2, 4, 8"),
        ({"pp": 3}, "1f1b", "pp=3 cuts 8 devices"),
        ({"pp": 2}, "dualpipe-x", "write one of gpipe, 1f1b"),
        ({"pp": [1, 2, 6]}, None, "add up to 8"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_capture(dims: dict[str, object], schedule: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        autopar.plan(NeverRun(), (torch.ones(2),), cluster="8 H100-SXM", dims=dims, schedule=schedule,
            with_baselines=False)


def test_both_directions_need_an_even_number_of_groups() -> None:
    check_stages(Cluster.parse("1x6 H100-SXM"), None, {"pp": 2}, "dualpipe")
    with pytest.raises(ConfigurationError, match=r"schedule='chimera' runs in both directions .*not pp=3"):
        check_stages(Cluster.parse("1x6 H100-SXM"), None, {"pp": 3}, "chimera")


def test_groups_of_given_sizes_lie_inside_of_nodes_or_fill_them() -> None:
    check_stages(Cluster.parse("2x4 H100-SXM"), None, {"pp": [4, 4]}, None)
    with pytest.raises(ConfigurationError, match="a rank group of 6 of 8 devices in nodes of 4"):
        check_stages(Cluster.parse("2x4 H100-SXM"), None, {"pp": [2, 6]}, None)

"""A device map of Accelerate becomes stages that are cut where it cuts, or is refused by the entry that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import autopar
from autopar.cli.import_command import import_
from autopar.errors import ConfigurationError
from autopar.exporters.written_device_map import device_map
from autopar.importers.read_configurations import plan_options, read_configuration
from autopar.importers.read_device_map import stage_edits, stages_of_map


class Chain(nn.Module):
    """Four layers and a head that weighs more than a layer. forward(x (B, 16)) -> scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.drop(x)).pow(2).mean()


def chain(batch: int, seq: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """For the command line."""
    return Chain(), (torch.zeros(batch, 16),)


MAP = {"layers.0": 0, "layers.1": 1, "layers.2": 1, "layers.3": 1, "drop": 1, "head": 1}


@pytest.mark.parametrize("second", [1, "1", "cuda:1", torch.device("cuda:1")], ids=str)
def test_devices_are_numbers_words_or_of_torch(second: Any) -> None:
    assert stages_of_map({"a": 0, "b": second}) == {"a": 0, "b": 1}


def test_stages_count_the_devices_as_they_appear() -> None:
    assert stages_of_map({"a": 3, "b": 3, "c": 0}) == {"a": 0, "b": 0, "c": 1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("auto", "model.hf_device_map"),
        ({}, "has names and devices"),
        ({"a": 0, "b": "disk"}, "'b' is on 'disk'"),
        ({"a": "cpu"}, "'a' is on 'cpu'"),
        ({"a": 0, "b": True}, "'b' is on True"),
        ({"a": 0, "b": "gpu"}, "'b' is on 'gpu'; write the number"),
        ({"a": 0, "b": 1, "c": 0}, "'c' is on device 0 again, behind modules on device 1"),
    ],
    ids=str,
)
def test_what_a_plan_cannot_say_is_refused_by_its_entry(given: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        stages_of_map(given)
    assert words in str(error.value)


def test_the_command_cuts_where_the_map_cuts(tmp_path: Path) -> None:
    where, made = tmp_path / "map.json", tmp_path / "plan.json"
    plans = []
    for cut in (MAP, {**MAP, "layers.1": 0, "layers.2": 0}):
        where.write_text(json.dumps(cut))
        command = f"{where} --from device_map --model {__name__}:chain --batch 32 --seq 1 -o {made}".split()
        found = CliRunner().invoke(import_, [*command, "--cluster", "2 A100-80"], catch_exceptions=False)
        assert found.exit_code == 0, found.output
        plans.append(autopar.Plan.load(made))
    first, second = (device_map(plan)[0] for plan in plans)
    assert first == {"layers.0": 0, "layers.1": 1, "layers.2": 1, "layers.3": 1, "head": 1}
    assert second == {"layers.0": 0, "layers.1": 0, "layers.2": 0, "layers.3": 1, "head": 1}, "the mutation"
    assert stage_edits(stages_of_map(MAP), plans[0]).keys() == first.keys()
    with pytest.raises(ConfigurationError, match="the plan 2 stages"):
        stage_edits({"layers": 0}, plans[0])
    with pytest.raises(ConfigurationError, match="names no module of the model on some device"):
        stage_edits({"encoder": 0, "decoder": 1}, plans[0])


def test_the_options_ask_for_as_many_stages() -> None:
    uniform = read_configuration(json.dumps(MAP), "device_map", num_devices=2, origin="map.json")
    assert plan_options(uniform)["dims"] == {"pp": 2}
    with pytest.raises(ConfigurationError, match="make 2 devices, the cluster has 4"):
        read_configuration(json.dumps(MAP), "device_map", num_devices=4, origin="map.json")

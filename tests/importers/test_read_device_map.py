"""A device map of Accelerate becomes stages that are cut where it cuts, or is refused by the entry that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import autopar
from autopar.cli.import_command import import_
from autopar.errors import ConfigurationError
from autopar.exporters.written_device_map import device_map
from autopar.importers.read_configurations import plan_options, read_configuration
from autopar.importers.read_device_map import stage_edits, stages_of_map

MAP = {
    "transformer.wte": 0,
    "transformer.wpe": 0,
    "transformer.drop": 0,
    "transformer.h.0": 0,
    "transformer.h.1": 1,
    "transformer.h.2": 1,
    "transformer.ln_f": 1,
    "lm_head": 1,
}


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
    """A plan of the same cluster without the map cuts elsewhere: GPT-2's head weighs more than a block."""
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 32}
    configuration = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes}
    model, where, made = tmp_path / "config.json", tmp_path / "map.json", tmp_path / "plan.json"
    model.write_text(json.dumps(configuration))
    where.write_text(json.dumps(MAP))
    command = f"{where} --from device_map --model hf:{model} --batch 12 --seq 32 -o {made}".split()
    found = CliRunner().invoke(import_, [*command, "--cluster", "2 A100-80"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    plan = autopar.Plan.load(made)
    again, _ = device_map(plan)
    assert {name.split(".")[-1]: device for name, device in again.items()} == {
        "wte": 0, "wpe": 0, "0": 0, "1": 1, "2": 1, "ln_f": 1,
    }  # fmt: skip
    assert stage_edits(stages_of_map(again), plan)["transformer.h.1"] == {"pp": 1}
    with pytest.raises(ConfigurationError, match="the plan 2 stages"):
        stage_edits({"transformer": 0}, plan)
    with pytest.raises(ConfigurationError, match="names no module of the model on some device"):
        stage_edits({"encoder": 0, "decoder": 1}, plan)


def test_the_options_ask_for_as_many_stages() -> None:
    uniform = read_configuration(json.dumps(MAP), "device_map", num_devices=2, origin="map.json")
    assert plan_options(uniform)["dims"] == {"pp": 2}
    with pytest.raises(ConfigurationError, match="make 2 devices, the cluster has 4"):
        read_configuration(json.dumps(MAP), "device_map", num_devices=4, origin="map.json")

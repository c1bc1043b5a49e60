"""A plan's stages as a device map: whole modules, each on the rank group whose stage runs it."""

from __future__ import annotations

import json
from dataclasses import replace

from autopar.exporters.uniform import nearest_uniform
from autopar.exporters.written_configurations import configuration
from autopar.exporters.written_device_map import device_map
from autopar.layouts.placement import Mesh, Replicate
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import OperatorPlan, ParameterPlan, PipelinePlan, StagePlan
from tests.plans.test_plan_text import small_plan

R = Replicate()
PARAMETER = ParameterPlan(stored=(R,), used=(R,), gradient=(R,))
OPERATOR = OperatorPlan(axes=(None,), inputs=((R,),), outputs=((R,),))
NAMES = ("embed.weight", "layers.0.up.weight", "layers.0.down.weight", "layers.1.up.weight", "layers.1.down.weight")


def staged(last: str, devices: int = 1) -> Plan:
    """Two stages, the first of which ends with the product of a module."""
    modules = [name.removesuffix(".weight") for name in (*NAMES, "head.weight")]
    stages = (
        StagePlan(name="first", last_operator=f"{last}/mm#0", rank_group=0),
        StagePlan(name="second", last_operator=None, rank_group=1),
    )
    return replace(
        small_plan(),
        mesh=Mesh(("pp", "dp_shard"), (2, devices)),
        parameters=dict.fromkeys((*NAMES, "head.weight"), PARAMETER),
        operators={f"{module}/mm#0{phase}": OPERATOR for phase in ("", "/bwd") for module in modules},
        inputs={},
        pipeline=PipelinePlan(schedule="1f1b", chunks=1, stages=stages),
    )


def test_the_highest_modules_on_one_device_are_named() -> None:
    found, lost = device_map(staged("layers.0.down"))
    assert found == {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1}
    assert lost == []


def test_a_layer_that_stages_share_is_named_by_its_parts() -> None:
    found, _ = device_map(staged("layers.1.up"))
    assert found == {"embed": 0, "layers.0": 0, "layers.1.up": 0, "layers.1.down": 1, "head": 1}


def test_another_cut_is_another_map() -> None:
    """The mutation that the tests above must catch."""
    assert device_map(staged("layers.1.down"))[0] == {"embed": 0, "layers": 0, "head": 1}


def test_a_plan_without_stages_is_on_one_device_and_says_what_is_lost() -> None:
    plan = small_plan()
    made = configuration(plan, nearest_uniform(plan), "device_map")
    assert json.loads(made.text) == {"": 0}
    assert any("8 devices of a rank group share its modules" in sentence for sentence in made.lost)
    assert "2 devices" in device_map(staged("embed", devices=2))[1][0]


def test_a_module_that_runs_in_several_stages_is_on_the_first() -> None:
    plan = staged("layers.0.down")
    found, _ = device_map(replace(plan, operators={**plan.operators, "embed/mm#1": OPERATOR}))
    assert found == {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1}


def test_a_parameter_that_no_operator_reads_takes_the_place_of_what_is_around_it() -> None:
    plan = staged("layers.0.down")
    found, _ = device_map(replace(plan, parameters={**plan.parameters, "layers.1.unused.scale": PARAMETER}))
    assert found == {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1}

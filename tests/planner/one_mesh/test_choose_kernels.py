"""Kernels of ours are chosen where the program is cheaper with them; what is planned and predicted is what runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.passes.kernels.graph_patterns import name_of
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.passes.lowering.chain import lowered_on
from autopar.planner.memory.lowered_bytes import completed_bytes
from autopar.planner.one_mesh.choose_kernels import _Price, bytes_for_backward, cheaper_kernels
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes
from autopar.simulation.played_plan import simulate_plan
from benchmarks.models import t5
from benchmarks.vision import UNet


def model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        tokens = torch.empty(16, 512, dtype=torch.long)
        return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


@pytest.fixture(scope="module")
def plan() -> Plan:
    module, inputs = model()
    found = autopar.plan(module, inputs, cluster="1x2 H100-SXM", dims={"dp_shard": 2}, precision="bf16",
        with_baselines=False)
    assert isinstance(found, Plan)
    return found


def test_a_plan_for_gpus_names_kernels_that_make_its_step_shorter_and_smaller(plan: Plan) -> None:
    module, inputs = model()
    program, cluster = capture(module, (), inputs, precision="bf16"), Cluster.parse("1x2 H100-SXM")
    assert "cross_entropy" in plan.kernels  # the logits are read and written less often
    asked = {"cluster": "1x2 H100-SXM", "dims": {"dp_shard": 2}, "precision": "bf16"}
    without = autopar.plan(module, inputs, kernels=(), with_baselines=False, **asked)
    assert isinstance(without, Plan)
    assert plan.objective_seconds < without.objective_seconds  # the solver's own sum has them
    ours, plain = (simulate_plan(one, program, cluster, torch.optim.AdamW) for one in (plan, without))
    assert ours.step_seconds < plain.step_seconds
    assert ours.peak_bytes < plain.peak_bytes
    assert plan.predicted.step_seconds == pytest.approx(ours.step_seconds, rel=1e-6)


def test_what_a_kernel_computes_in_one_node_is_not_held_in_between() -> None:
    module, inputs = model()
    planner = autopar.Planner(module, inputs, cluster="1x2 H100-SXM", precision="bf16")
    asked = planner.plan(dims={"dp_shard": 2}, mode="fast")
    assert "cross_entropy" in asked.kernels
    (limit, _), *_ = asked.explain("lm_head.weight").limits
    assert f"the plan holds {format_bytes(asked.predicted.peak_bytes)} at" in limit


def test_moments_without_a_node_hold_what_the_model_says_within_those_around() -> None:
    measured = np.array([np.nan, 2.0, np.nan, np.nan, 5.0, np.nan, 3.0])
    modelled = np.array([9.0, 1.0, 4.0, 9.0, 1.0, 9.0, 1.0])
    assert completed_bytes(measured, modelled).tolist() == [2.0, 2.0, 4.0, 5.0, 5.0, 5.0, 3.0]


def test_the_file_says_which_and_takes_an_edit(plan: Plan) -> None:
    text = plan.to_json()
    assert Plan.from_json(text).kernels == plan.kernels
    assert "kernels of ours in the place of groups: " + ", ".join(plan.kernels) in plan.summary()
    wrong = text.replace(b'"cross_entropy"', b'"magic"')
    with pytest.raises(ConfigurationError, match="kernels: 'magic' is none of ours; write some of rms_norm"):
        Plan.from_json(wrong)


def test_cpus_have_nothing_to_choose() -> None:
    module, inputs = model()
    program = capture(module, (), inputs, precision="bf16")
    assert cheaper_kernels(program, "eager", Cluster.parse("1x2 cpu").device) == ()


def test_norms_may_cost_a_little_where_they_keep_much_less() -> None:
    with torch.device("meta"):
        tokens = torch.empty(32, 512, dtype=torch.long)
        module = t5(layers=2, width=1024, heads=16, vocabulary=512).to(torch.bfloat16)
    program, device = capture(module, (), {"input_ids": tokens, "labels": tokens}), Cluster.parse("1 H100-SXM").device
    price, ours = _Price("inductor", device), with_kernels(program, ("rms_norm",))
    assert price.of(program) * 1.001 < price.of(ours) < price.of(program) * 1.01
    assert bytes_for_backward(ours) < 0.8 * bytes_for_backward(program)
    assert "rms_norm" in cheaper_kernels(program, "inductor", device)


def test_a_plan_keeps_the_kernels_that_it_lays_out(plan: Plan) -> None:
    assert plan.with_(kernels=plan.kernels[::-1], notes=()).kernels == plan.kernels[::-1]
    with pytest.raises(ConfigurationError, match=r"cross_entropy.* plan again with kernels=\(\)"):
        plan.with_(kernels=())
    module, inputs = model()
    with pytest.raises(ConfigurationError, match="kernels= names 'magic'; write some of rms_norm"):
        autopar.plan(module, inputs, cluster="1x2 H100-SXM", kernels=["magic"])


def test_stages_have_them_too() -> None:
    module, inputs = model()
    found = autopar.plan(
        module, inputs, cluster="1x2 H100-SXM", dims={"pp": 2}, precision="bf16", mode="fast", micro_batches=2,
        with_baselines=False,
    )
    assert isinstance(found, Plan)
    assert {"rms_norm", "gated", "cross_entropy"} <= {*found.kernels}
    assert "model.norm/rms_norm#0" in found.operators
    micro = found.origin.source.program_of(found)  # type: ignore[union-attr]
    programs = [stage.program for stage in lowered_on(micro, found, (0, 1)).stages]
    names = {name_of(node) for program in programs for node in program.graph.nodes}
    assert {"rms_norm", "gated_backward", "cross_entropy_backward"} <= names


def test_classes_per_pixel_are_no_rows_for_the_cross_entropy() -> None:
    images, masks = torch.randn(4, 3, 16, 16), torch.zeros(4, 16, 16, dtype=torch.long)
    found = autopar.plan(
        UNet(channels=(32, 64), classes=4), {"images": images, "masks": masks}, cluster="1x2 H100-SXM", mode="fast"
    )
    assert isinstance(found, Plan)
    assert "cross_entropy" not in found.kernels

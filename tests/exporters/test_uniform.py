"""Roles of axes and degrees, read from plans that the planner made under names, and then without them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConfigurationError
from autopar.exporters.uniform import UniformPlan, nearest_uniform
from autopar.exporters.written_configurations import TOOLS, configuration
from autopar.importers.read_configurations import plan_options, read_configuration
from autopar.layouts.placement import Mesh
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import axis_roles
from autopar.plans.plan_value import ParameterPlan
from benchmarks.models import gpt2, token_inputs
from tests.capture.expert_models import mixture
from tests.plans.test_plan_text import small_plan


@cache
def planned(*dims: tuple[str, int]) -> Plan:
    model = gpt2(layers=2, width=64, heads=4, vocabulary=96, positions=32)
    cluster = "2x4 A100-80"
    return autopar.plan(
        model, token_inputs(96)(16, 32), cluster=cluster, dims=dict(dims), optimizer=torch.optim.AdamW,
        precision="bf16", with_baselines=False,
    )


def anonymous(plan: Plan) -> Plan:
    """The same plan with names of axes that say nothing."""
    inner = tuple(f"axis{index}" for index in range(len(plan.layout_mesh.shape)))
    names = ("pp", *inner) if plan.pipeline is not None else inner
    return replace(plan, mesh=Mesh(names, plan.mesh.shape))


@pytest.mark.exhaustive(sample="dims1")
@pytest.mark.parametrize(
    "dims", [(("dp_shard", 8),), (("dp_replicate", 8),), (("dp_shard", 4), ("tp", 2)), (("dp_replicate", 2), ("tp", 4))]
)
def test_roles_follow_from_the_layouts_where_names_say_nothing(dims: tuple[tuple[str, int], ...]) -> None:
    plan = planned(*dims)
    assert axis_roles(anonymous(plan)) == axis_roles(plan) == tuple(name for name, _ in dims)
    uniform = nearest_uniform(anonymous(plan))
    assert {name: getattr(uniform, name) for name, _ in dims} == dict(dims)
    assert uniform.num_devices == 8
    assert (uniform.batch, uniform.sequence, uniform.precision) == (16, 32, "bf16")


def test_what_lies_otherwise_is_lost_with_its_name() -> None:
    plan = planned(("dp_shard", 4), ("tp", 2))
    name = "transformer.h.1.mlp.c_fc.weight"
    assert not any(name in sentence for sentence in nearest_uniform(plan).lost)
    whole = replace(plan.parameters[name], stored=tuple(autopar.Replicate() for _ in plan.mesh.shape))
    edited = plan.with_(parameters={name: whole, **{n: p for n, p in plan.parameters.items() if n != name}})
    assert any(f"as {name}" in sentence and "stay whole" in sentence for sentence in nearest_uniform(edited).lost)


@pytest.mark.exhaustive
def test_stages_and_micro_batches_are_degrees() -> None:
    uniform = nearest_uniform(planned(("pp", 2), ("dp_shard", 4)))
    assert (uniform.pp, uniform.dp_shard, uniform.num_devices) == (2, 4, 8)
    assert uniform.schedule is not None
    assert uniform.micro_batches > 1
    assert uniform.dims == {"pp": 2, "dp_shard": 4}


UNIFORM = UniformPlan(
    dp_replicate=2, dp_shard=4, tp=2, pp=2, zero_stage=3, sequence_parallel=True, schedule="1f1b", micro_batches=4,
    batch=64, sequence=128, recompute="full", precision="bf16",
)  # fmt: skip


PLAN = small_plan()
R, S0 = autopar.Replicate(), autopar.Shard(0)
ATTENTION = PLAN.operators["layers.0.up/mm#0"]


def attending(*ways: tuple[str, str | None], names: tuple[str, str] = ("dp_shard", "cp"), zigzag: bool = True) -> Plan:
    """small_plan on two axes of 2 and 4 with attentions: (implementation, what the last axis splits); a split of the
    sequence in zigzag order, and over `cp` in front of `cp_inner` a ring."""
    outer = "s" if names[0] == "cp" else "b"
    cut = autopar.Shard(2, 2, zigzag) if zigzag else autopar.Shard(2)
    attentions = {
        f"layers.{n}/attention#0": replace(
            ATTENTION, axes=(outer, split), implementation=way, inputs=((cut, cut),) * 3, outputs=((cut, cut),)
        )
        for n, (way, split) in enumerate(ways)
    }
    return replace(PLAN, mesh=Mesh(names, (2, 4)), operators=attentions)


@pytest.mark.parametrize(
    ("attention", "way"), [(("ring", "s"), "ring"), (("default", "s"), "gather"), (("default", "h"), "ulysses"),
                           (("default", "g"), "ulysses")]
)  # fmt: skip
def test_the_way_of_context_parallelism_is_read_off_attention(attention: tuple[str, str], way: str) -> None:
    uniform = nearest_uniform(attending(attention, attention))
    assert (uniform.cp, uniform.cp_way, uniform.asked_way, uniform.cp_inner) == (4, way, way, 1)
    assert uniform.dims == {"dp_shard": 2, "cp": 4}
    assert not [sentence for sentence in uniform.lost if "attention" in sentence]


def test_ways_that_differ_are_lost_with_their_numbers() -> None:
    uniform = nearest_uniform(attending(("ring", "s"), ("ring", "s"), ("default", "h"), ("default", None)))
    assert (uniform.cp_way, uniform.asked_way, uniform.dims) == ("mixed", None, {"dp_shard": 2, "cp": 4})
    words = "ring in 2 over cp=4, ulysses in 1 over cp=4, neither of these in 1 over cp=4"
    assert f"attention does not run in one way over context parallelism: {words}" in uniform.lost
    plain = nearest_uniform(attending(("ring", "s"), ("default", "h"), zigzag=False)).lost
    assert any(sentence.startswith("1 of 1 attentions read contiguous blocks") for sentence in plain)


def test_heads_in_a_ring_are_two_axes() -> None:
    uniform = nearest_uniform(attending(("ring", "h"), names=("cp", "cp_inner")))
    assert (uniform.cp, uniform.cp_inner, uniform.dims) == (8, 4, {"cp": 2, "cp_inner": 4})
    text = configuration(PLAN, uniform, "megatron").text
    assert "--cp-comm-type a2a+p2p\n--hierarchical-context-parallel-sizes 4 2\n" in text
    for tool in ("torchtitan", "accelerate"):
        lost = configuration(PLAN, uniform, tool).lost
        assert any("cp=8 runs as ulysses over 4 ranks beside each other in a ring of 2" in each for each in lost)


def test_tools_are_told_the_way_of_context_parallelism() -> None:
    ring = replace(UNIFORM, pp=1, schedule=None, cp=4, cp_way="ring", cp_shards=True)
    said = {
        "ring": ('context_parallel_rotate_method = "alltoall"', "--cp-comm-type p2p\n", "comm_strategy: alltoall\n"),
        "gather": ('method = "allgather"', "--cp-comm-type allgather\n", "comm_strategy: allgather\n"),
        "ulysses": (None, "--cp-comm-type a2a\n", "  parallelism_config_sp_size: 4\n"),
    }
    for way, words in said.items():
        for tool, word in zip(("torchtitan", "megatron", "accelerate"), words, strict=True):
            found = configuration(PLAN, replace(ring, cp_way=way), tool)
            assert (word or "context_parallel_degree = 4") in found.text
            assert (word is None) == any(f"runs as {way}: no word" in sentence for sentence in found.lost)
    assert "rotate_method" not in configuration(PLAN, replace(ring, cp_way="ulysses"), "torchtitan").text
    yaml = configuration(PLAN, replace(ring, cp_way="ulysses"), "accelerate")
    assert "distributed_type: DEEPSPEED\n" in yaml.text
    assert "zero_stage: 3\n" in yaml.text
    assert any("tensor parallelism of 2" in sentence for sentence in yaml.lost)


def test_parameters_over_context_parallelism_lie_as_the_tool_has_them_or_are_lost() -> None:
    """torch shards over dp_shard x cp, Megatron-LM over the ranks of its distributed optimizer."""
    whole = replace(UNIFORM, pp=1, schedule=None, cp=4, cp_way="ring")
    for tool, zero_stage, shards, lost in (
        ("torchtitan", 3, False, "whole over cp=4 in the plan; they are sharded"), ("torchtitan", 3, True, None),
        ("megatron", 3, False, "whole over cp=4 in the plan; they are sharded"), ("megatron", 3, True, None),
        ("megatron", 0, False, None), ("accelerate", 0, False, "whole over cp=4"),
    ):  # fmt: skip
        found = configuration(PLAN, replace(whole, zero_stage=zero_stage, cp_shards=shards), tool).lost
        assert [sentence for sentence in found if "parameters are" in sentence and (lost or "") in sentence] == (
            [sentence for sentence in found if "parameters are" in sentence]
        )
        assert any("parameters are" in sentence for sentence in found) == (lost is not None)
    stored = replace(next(iter(PLAN.parameters.values())), stored=(autopar.Replicate(), autopar.Shard(0)))
    over = replace(attending(("ring", "s")), parameters={"w": stored})
    assert (nearest_uniform(over).cp_shards, nearest_uniform(over).zero_stage) == (True, 3)
    assert not nearest_uniform(attending(("ring", "s"))).cp_shards


def test_torchtitan_reads_the_degrees() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    found = tomllib.loads(configuration(PLAN, UNIFORM, "torchtitan").text)
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 4,
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 2,
    }
    assert found["training"]["local_batch_size"] * 8 == found["training"]["global_batch_size"] == 64
    assert found["activation_checkpoint"] == {"mode": "full"}


def test_megatron_is_told_flags() -> None:
    words = configuration(PLAN, replace(UNIFORM, pp=1, schedule=None), "megatron").text.split()
    flags = dict(zip(words, [*words[1:], ""], strict=True))
    assert (flags["--tensor-model-parallel-size"], flags["--micro-batch-size"]) == ("2", "2")
    assert flags["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert {"--sequence-parallel", "--bf16", "--use-megatron-fsdp"} <= set(words)
    staged = configuration(PLAN, UNIFORM, "megatron")
    assert "--data-parallel-sharding-strategy optim\n" in staged.text
    assert any("FSDP" in sentence for sentence in staged.lost)


def test_deepspeed_and_accelerate_say_what_they_cannot() -> None:
    found = configuration(PLAN, UNIFORM, "deepspeed")
    document = json.loads(found.text)
    ranks = UNIFORM.data_ranks
    parts = document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"] * ranks
    assert parts == document["train_batch_size"] == 64
    assert document["zero_optimization"]["stage"] == 2
    assert any("pipeline" in sentence for sentence in found.lost)
    yaml = configuration(PLAN, replace(UNIFORM, pp=1, schedule=None), "accelerate").text
    assert "num_processes: 16\n" in yaml
    assert "  parallelism_config_dp_shard_size: 4\n" in yaml


def test_an_unknown_tool_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=", ".join(TOOLS)):
        configuration(PLAN, UNIFORM, "horovod")


EXPERTS = replace(UNIFORM, pp=1, schedule=None, tp=1, ep=3, zero_stage=2, recompute="none")


def test_expert_parallelism_runs_on_ranks_that_shard() -> None:
    """4 x 3 ranks shard what is no expert; ZeRO-2 keeps what it gathered."""
    titan = configuration(PLAN, EXPERTS, "torchtitan").text
    assert "data_parallel_shard_degree = 12\n" in titan
    assert 'fsdp_reshard_after_forward = "never"\n' in titan
    yaml = configuration(PLAN, EXPERTS, "accelerate").text
    assert "  parallelism_config_dp_shard_size: 12\n" in yaml
    assert "  fsdp_reshard_after_forward: false\n" in yaml
    assert "  fsdp_activation_checkpointing: false\n" in yaml


def of_experts(way: str, **asked: Any) -> Plan:
    model, inputs = mixture("hits")
    found = autopar.plan(
        model, {name: each.repeat(2, 1) for name, each in inputs.items()}, cluster="4 cpu",
        dims={"dp_shard": 2, "ep": 2}, ep=way, mode="fast", with_baselines=False, **asked,  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("tool", ["torchtitan", "megatron"])
def test_a_plan_whose_rows_travel_comes_back(tool: str) -> None:
    plan = of_experts("dispatch")
    uniform = nearest_uniform(plan)
    assert (uniform.dims, uniform.num_devices) == ({"dp_shard": 2, "ep": 2}, 4)
    assert not [sentence for sentence in uniform.lost if "products" in sentence]
    text = configuration(plan, replace(uniform, zero_stage=3), tool).text
    options = plan_options(read_configuration(text, tool, num_devices=4, origin="job"))
    assert (options["dims"], options["ep"]) == ({"dp_shard": 2, "ep": 2}, "dispatch")


def test_a_capacity_comes_back_from_megatron_and_is_lost_in_torchtitan() -> None:
    plan = of_experts("capacity", expert_capacity=1.5)
    uniform = nearest_uniform(plan)
    assert (uniform.ep, uniform.expert_capacity) == (2, 1.5)
    assert not [sentence for sentence in uniform.lost if "products" in sentence]
    flags = configuration(plan, uniform, "megatron").text
    assert "--moe-expert-capacity-factor 1.5\n--moe-pad-expert-input-to-capacity\n" in flags
    options = plan_options(read_configuration(flags, "megatron", num_devices=4, origin="job"))
    assert (options["ep"], options["expert_capacity"]) == ("capacity", 1.5)
    lost = configuration(plan, uniform, "torchtitan").lost
    assert any("beyond 1.5 times an expert's even share are dropped in the plan only" in each for each in lost)


def test_other_ways_of_experts_are_other_degrees_or_lost() -> None:
    masked = nearest_uniform(of_experts("masked"))
    assert masked.ep == 2
    assert [sentence for sentence in masked.lost if "experts" in sentence] == [
        "3 of 3 products of experts send no rows over ep=2; in tools all do"
    ]
    assert nearest_uniform(of_experts("gather")).ep == 1


def test_parameters_over_expert_parallelism_lie_as_the_tool_has_them_or_are_lost() -> None:
    """Those of experts lie split whatever the others do."""
    def over_ep(used: autopar.Replicate | autopar.Shard, stored: autopar.Replicate | autopar.Shard) -> ParameterPlan:
        return ParameterPlan(stored=(R, stored), used=(R, used), gradient=(R, stored), keep_gathered=False)

    product = replace(ATTENTION, axes=("t", "t+e"))
    plan = replace(PLAN, mesh=Mesh(("dp_shard", "ep"), (2, 4)), operators={"mlp/expert_linear#0": product})
    experts = {"up": over_ep(S0, S0), "down": over_ep(S0, S0)}
    for stored, shards in ((S0, True), (R, False)):
        uniform = nearest_uniform(replace(plan, parameters={**experts, "norm": over_ep(R, stored)}))
        assert (uniform.ep, uniform.ep_shards, uniform.zero_stage) == (4, shards, 3 if shards else 0)
        lost = configuration(PLAN, uniform, "torchtitan").lost
        assert any("whole over ep=4 in the plan; they are sharded" in sentence for sentence in lost) != shards
    beside = configuration(PLAN, replace(EXPERTS, ep=4, ep_shards=True, tp=2), "torchtitan")
    assert "expert_parallel_degree = 8\n" in beside.text
    assert any("takes the 2 ranks of context and tensor parallelism too here: 8 parts" in each for each in beside.lost)


def test_zero_3_gathers_again_and_blocks_are_recomputed_where_the_plan_does() -> None:
    yaml = configuration(PLAN, replace(UNIFORM, pp=1, schedule=None), "accelerate").text
    assert "  fsdp_reshard_after_forward: true\n" in yaml
    assert "  fsdp_activation_checkpointing: true\n" in yaml


def test_products_of_forward_that_split_something_else_are_lost_and_those_of_backward_are_not_counted() -> None:
    """small_plan's product splits the batch over dp_shard, and nothing over tp."""
    product = PLAN.operators["layers.0.up/mm#0"]
    other = replace(product, axes=(None, "n"))
    both = PLAN.with_(operators={"layers.0.up/mm#0": product, "layers.0.up/mm#1/bwd": other})
    sentences = [sentence for sentence in nearest_uniform(both).lost if "products" in sentence]
    assert sentences == ["1 of 1 products do not split tp over tp=4 (as layers.0.up/mm#0)"]

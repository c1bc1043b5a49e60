"""What the exporters write is read back with the same degrees; what a plan cannot be told is refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import autopar
from autopar.cli.import_command import import_
from autopar.errors import ConfigurationError
from autopar.exporters.uniform import UniformPlan, nearest_uniform
from autopar.exporters.written_configurations import configuration
from autopar.importers.read_configurations import READERS, plan_options, read_configuration
from benchmarks.models import gpt2, token_inputs
from tests.plans.test_plan_text import small_plan

PLAN = small_plan()
FLAT = UniformPlan(
    dp_replicate=2, dp_shard=4, tp=2, zero_stage=3, batch=64, sequence=128, sequence_parallel=True, precision="bf16"
)
STAGED = replace(FLAT, pp=2, schedule="interleaved", chunks=2, micro_batches=4, recompute="full")
SAID = {
    "torchtitan": ("dims", "cp_way", "ep_shards", "micro_batches", "schedule", "recompute", "precision", "batch",
                   "sequence", "zero_stage"),
    "megatron": ("dims", "cp_way", "ep_shards", "expert_capacity", "micro_batches", "schedule", "recompute",
                 "precision", "batch", "zero_stage"),
    "deepspeed": ("dims", "micro_batches", "precision", "batch"),
    "accelerate": ("dims", "cp_way", "recompute", "precision"),
}  # fmt: skip
"""What each tool's configuration says of a plan."""


def read(text: str, tool: str, num_devices: int = 16) -> UniformPlan:
    return read_configuration(text, tool, num_devices=num_devices, origin="job")


def exported(uniform: UniformPlan, tool: str) -> str:
    return configuration(PLAN, uniform, tool).text


UNIFORM = {
    "hsdp": FLAT,
    "ddp": replace(FLAT, dp_replicate=8, dp_shard=1, zero_stage=0),
    "fsdp": replace(FLAT, dp_replicate=1, dp_shard=8),
    "tp": replace(FLAT, dp_shard=1, zero_stage=0, dp_replicate=1, tp=16),
    "stages": STAGED,
    "ring": replace(FLAT, dp_replicate=1, cp=2, cp_way="ring", cp_shards=True),
    "gather": replace(FLAT, cp=4, cp_way="gather", dp_shard=1, dp_replicate=2, cp_shards=True),
    "ulysses": replace(FLAT, dp_replicate=1, tp=1, cp=4, cp_way="ulysses", cp_shards=True),
    "experts": replace(FLAT, dp_replicate=1, ep=2, ep_shards=True),
    "experts alone": replace(FLAT, dp_replicate=2, dp_shard=1, ep=4, ep_shards=True, tp=1),
    "experts and ring": replace(
        FLAT, dp_replicate=1, dp_shard=2, ep=2, ep_shards=True, cp=2, cp_way="ring", cp_shards=True
    ),
    "experts of a capacity": replace(FLAT, dp_replicate=1, ep=2, ep_shards=True, expert_capacity=1.25),
    "levels": replace(FLAT, dp_shard=1, dp_replicate=1, cp=8, cp_inner=4, cp_way="mixed", cp_shards=True),
}
EXPERTS = tuple(name for name in UNIFORM if name.startswith("experts"))
UNSAID = {
    "torchtitan": ("ulysses", "levels"),
    "megatron": (),
    "deepspeed": ("stages", "ring", "gather", "ulysses", "levels", *EXPERTS),
    "accelerate": ("stages", "levels", *EXPERTS),
}
"""Plans for which a tool has no words."""
OF_DEGREES = [tool for tool in READERS if tool != "device_map"]


@pytest.mark.parametrize(
    ("tool", "name"), [(tool, name) for tool in OF_DEGREES for name in UNIFORM if name not in UNSAID[tool]]
)
def test_an_export_is_read_back_with_its_degrees(tool: str, name: str) -> None:
    uniform = UNIFORM[name]
    found = read(exported(uniform, tool), tool, uniform.num_devices)
    assert {name: getattr(found, name) for name in SAID[tool]} == {name: getattr(uniform, name) for name in SAID[tool]}


def test_another_degree_is_another_plan() -> None:
    """The mutation that the round trip must catch."""
    text = exported(FLAT, "megatron").replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4")
    assert read(text, "megatron").dims == {"dp_replicate": 2, "dp_shard": 2, "tp": 4}


@pytest.mark.exhaustive
def test_a_planned_model_comes_back() -> None:
    model = gpt2(layers=1, width=64, heads=4, vocabulary=96, positions=32)
    dims = {"dp_shard": 2, "tp": 2}
    first = autopar.plan(model, token_inputs(96)(16, 32), cluster="4 A100-80", dims=dims, precision="bf16",
        with_baselines=False)
    again = read(configuration(first, nearest_uniform(first), "torchtitan").text, "torchtitan", 4)
    options = plan_options(again) | {"recompute": None}
    second = autopar.plan(model, token_inputs(96)(16, 32), cluster="4 A100-80", **options)
    assert (second.parameters, second.operators) == (first.parameters, first.operators)


@pytest.mark.parametrize(
    ("tool", "text", "words"),
    [
        ("torchtitan", "[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = 'ring'",
         r"job \[parallelism\]: context_parallel_rotate_method is 'ring', which a plan cannot say; .*'alltoall'"),
        ("torchtitan", "[parallelism]\ncontext_parallel_degree = 3", "make 15 devices, the cluster has 16"),
        ("torchtitan", "[parallelism]\nexpert_parallel_degree = 3",
         r"expert_parallel_degree is 3; it takes its ranks from 1 of context and tensor parallelism and 16 of data "
         "parallelism: write a multiple of 1 that divides 16"),
        ("torchtitan", "[parallelism]\nexpert_parallel_degree = 2\ntensor_parallel_degree = 4",
         "is 2; it takes its ranks from 4 of context and tensor .* a multiple of 4 that divides 16"),
        ("torchtitan", "[parallelism]\nexpert_parallel_degree = 8\ndata_parallel_replicate_degree = 4",
         "from 1 of .* and 4 of data parallelism"),
        ("torchtitan", "[parallelism]\nexpert_tensor_parallel_degree = 2", "tensor parallelism of experts alone is no"),
        ("megatron", "--expert-model-parallel-size 32", "-parallel-size is 32; .* a multiple of 1 that divides 16"),
        ("megatron", "--moe-expert-capacity-factor 0", "factor is '0'; write a number above 0, such as 1.25"),
        ("megatron", "--moe-expert-capacity-factor much", "factor is 'much'; write a number above 0, such as 1.25"),
        ("megatron", "--expert-tensor-parallel-size 2", "tensor parallelism of experts alone is no axis"),
        ("torchtitan", "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Other'",
         "pipeline_parallel_schedule is 'Other', which a plan cannot say"),
        ("torchtitan", "[training]\nenable_cpu_offload = true", "enable_cpu_offload is True; states live on"),
        ("torchtitan", "[training", "job is no TOML"),
        ("megatron", "--fp16 --tensor-model-parallel-size 2", "fp16 is True; an imported plan computes in fp32"),
        ("megatron", "--context-parallel-size 2 --cp-comm-type p2p p2p a2a --bf16",
         "cp-comm-type is 'a2a p2p'; a plan can be asked for one way in all layers"),
        ("megatron", "--context-parallel-size 2 --cp-comm-type ring", "cp-comm-type is 'ring'; .* one of p2p, a2a"),
        ("megatron", "--context-parallel-size 8 --cp-comm-type a2a+p2p", "is 'not given'; a2a.p2p takes two sizes"),
        ("megatron", "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
         "sizes is '2 2'; .* whose product is context-parallel-size 8"),
        ("megatron", "--tensor-model-parallel-size two", "'two'; it must be a whole number of at least 1"),
        ("megatron", "train.py", "job holds no flag"),
        ("megatron", "--tensor-model-parallel-size 3", "make 15 devices, the cluster has 16"),
        ("deepspeed", '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}', "offload_param is"),
        ("deepspeed", '{"fp16": {"enabled": true}}', "fp16 is enabled"),
        ("deepspeed", "[]", r"job must be a table of settings, not \[\]"),
        ("accelerate", "distributed_type: DEEPSPEED", "distributed_type is 'DEEPSPEED', which a plan cannot say"),
        ("accelerate", "parallelism_config:\n  parallelism_config_cp_size: 2\n  parallelism_config_sp_size: 2",
         "cp_size is 2 and parallelism_config_sp_size is 2; they exclude each other"),
        ("accelerate", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
         "parallelism_config:\n  parallelism_config_sp_size: 2", "deepspeed_config_file is 'ds.json'; write its ZeRO"),
        ("accelerate", "distributed_type: FSDP\nnum_processes: 8", "make 16 processes, num_processes is 8"),
        ("accelerate", "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true",
         "fsdp_offload_params is True"),
        ("fsdp2", "import torch", "fsdp2 is Python, which is not read"),
        ("alpa", "", "no importer for 'alpa': write one of torchtitan, megatron"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused_by_name(tool: str, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(text, tool)


def test_habits_of_the_tools_are_understood() -> None:
    assert read("[parallelism]\ntensor_parallel_degree = 4", "torchtitan").dims == {"dp_shard": 4, "tp": 4}
    assert read("distributed_type: FSDP", "accelerate").dims == {"dp_shard": 16}
    assert read("distributed_type: MULTI_GPU", "accelerate").dims == {"dp_replicate": 16}
    assert read('{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}', "deepspeed").dims == {
        "dp_shard": 16
    }
    script = "torchrun pretrain_gpt.py \\\n  --use-distributed-optimizer \\\n  --tensor-model-parallel-size=8 --bf16"
    assert read(script, "megatron").dims == {"dp_shard": 2, "tp": 8}
    unread = read("[parallelism]\ndata_parallel_shard_degree = 16\nenable_async_tensor_parallel = true", "torchtitan")
    assert "enable_async_tensor_parallel" in unread.lost[0]


def test_context_parallelism_is_asked_for_in_the_words_of_plan() -> None:
    """Data parallelism fills what context parallelism leaves; torch's default gathers, Megatron's is a ring."""
    titan = read("[parallelism]\ncontext_parallel_degree = 4", "torchtitan")
    assert (plan_options(titan)["dims"], plan_options(titan)["cp"]) == ({"dp_shard": 4, "cp": 4}, "gather")
    flags = read("--context-parallel-size 4 --tensor-model-parallel-size 2", "megatron")
    assert (flags.dims, flags.asked_way) == ({"dp_replicate": 2, "cp": 4, "tp": 2}, "ring")
    assert not any("parameters are sharded" in sentence for sentence in flags.lost)
    fsdp = read("--context-parallel-size 16 --use-distributed-optimizer --cp-comm-type a2a", "megatron")
    assert (fsdp.dims, fsdp.asked_way, fsdp.zero_stage) == ({"cp": 16}, "ulysses", 3)
    assert [sentence.partition(";")[0] for sentence in fsdp.lost] == ["parameters are sharded over cp=16 as well"]
    levels = "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes {}"
    inner = read(levels.format("4 2"), "megatron")
    assert (inner.dims, plan_options(inner)["cp"]) == ({"dp_replicate": 2, "cp": 2, "cp_inner": 4}, None)
    assert "which of cp and cp_inner splits heads" in inner.lost[-1]
    assert [read(levels.format(sizes), "megatron").asked_way for sizes in ("8 1", "1 8")] == ["ulysses", "ring"]
    one = read("--cp-comm-type a2a p2p --use-distributed-optimizer", "megatron")
    assert (one.dims, one.cp_way, one.lost) == ({"dp_shard": 16}, None, ())
    rest = "parallelism_config:\n  parallelism_config_cp_size: 4\n  parallelism_config_dp_shard_size: -1"
    assert read(f"distributed_type: FSDP\n{rest}", "accelerate").dims == {"dp_shard": 4, "cp": 4}
    zero = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: {}\nparallelism_config:\n" \
           "  parallelism_config_sp_size: 4\n  parallelism_config_dp_shard_size: 4"
    assert read(zero.format(3), "accelerate").dims == {"dp_shard": 4, "cp": 4}
    assert [read(zero.format(stage), "accelerate").zero_stage for stage in (0, 3)] == [0, 3]


def test_rows_of_experts_travel_over_ranks_of_data_parallelism() -> None:
    """What the tools take from context and tensor parallelism, too, is the planner's choice."""
    titan = read("[parallelism]\nexpert_parallel_degree = 4", "torchtitan")
    assert (plan_options(titan)["dims"], plan_options(titan)["ep"]) == ({"dp_shard": 4, "ep": 4}, "dispatch")
    assert not any("experts are split" in sentence for sentence in titan.lost)
    beside = read("[parallelism]\nexpert_parallel_degree = 8\ntensor_parallel_degree = 2", "torchtitan")
    assert beside.dims == {"dp_shard": 2, "ep": 4, "tp": 2}
    assert "experts are split over 2 ranks of context and tensor parallelism, too" in beside.lost[-1]
    covered = read("[parallelism]\nexpert_parallel_degree = 2\ntensor_parallel_degree = 2", "torchtitan")
    assert (covered.dims, plan_options(covered)["ep"]) == ({"dp_shard": 8, "tp": 2}, None)
    flags = read("--expert-model-parallel-size 4 --tensor-model-parallel-size 2", "megatron")
    assert (flags.dims, flags.ep_shards, flags.lost) == ({"dp_replicate": 2, "ep": 4, "tp": 2}, False, ())
    alone = "--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
    assert read(alone, "megatron").dims == {"dp_replicate": 4, "ep": 2, "tp": 2}
    fsdp = read("--expert-model-parallel-size 8 --use-distributed-optimizer", "megatron")
    assert (fsdp.dims, fsdp.ep_shards, fsdp.zero_stage) == ({"dp_shard": 2, "ep": 8}, True, 3)


def test_a_capacity_of_experts_is_that_of_the_flags() -> None:
    """By default Megatron drops the rows of the lowest probability, and pads none."""
    asked = "--expert-model-parallel-size 4 --moe-expert-capacity-factor 1.5"
    flags = read(asked, "megatron")
    options = plan_options(flags)
    assert (options["ep"], options["expert_capacity"]) == ("capacity", 1.5)
    assert [sentence.partition(":")[0] for sentence in flags.lost] == [
        "moe-token-drop-policy probs", "no moe-pad-expert-input-to-capacity"
    ]  # fmt: skip
    alike = f"{asked} --moe-token-drop-policy position --moe-pad-expert-input-to-capacity"
    assert read(alike, "megatron").lost == ()
    alone = read("--moe-expert-capacity-factor 1.5", "megatron")
    assert (plan_options(alone)["expert_capacity"], plan_options(alone)["ep"]) == (None, None)
    assert alone.lost == ("moe-expert-capacity-factor: a plan drops rows over an axis ep alone",)
    none = read("--expert-model-parallel-size 4 --moe-expert-capacity-factor -1", "megatron")
    assert (plan_options(none)["ep"], none.lost) == ("dispatch", ())


def test_the_command_writes_a_plan_with_these_degrees(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 32, "n_head": 4,
              "vocab_size": 96, "n_positions": 32}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = tmp_path / "flags.sh"
    flags.write_text("--tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 8 --bf16")
    words = [str(flags), "--from", "megatron", "--model", f"hf:{tmp_path / 'config.json'}", "--cluster", "4 H100-SXM"]
    missing = CliRunner().invoke(import_, words)
    assert isinstance(missing.exception, ConfigurationError)
    assert "does not say the sequence length: give --seq" in str(missing.exception)
    done = CliRunner().invoke(import_, [*words, "--seq", "16", "-o", str(tmp_path / "like.json")])
    assert done.exit_code == 0, done.exception
    plan = autopar.Plan.load(tmp_path / "like.json")
    assert dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)) == {"dp_replicate": 2, "tp": 2}
    assert (plan.question["batch"], plan.question["precision"]) == (8, "bf16")


def test_parameters_are_sharded_where_data_parallelism_shards_and_only_there() -> None:
    assert read("distributed_type: FSDP", "accelerate").zero_stage == 3
    assert read("distributed_type: MULTI_GPU", "accelerate").zero_stage == 0


def test_groups_of_one_rank_are_no_groups() -> None:
    """DeepSpeed's default of zero_hpz_partition_size is 1: parameters are sharded over all ranks."""
    for size, dims in ((1, {"dp_shard": 16}), (4, {"dp_replicate": 4, "dp_shard": 4})):
        text = json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}})
        assert read(text, "deepspeed").dims == dims


def test_a_key_that_stands_twice_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigurationError, match="the key 'num_processes' stands twice"):
        read("num_processes: 8\nnum_processes: 16", "accelerate")


def test_one_micro_batch_is_asked_for_with_stages_and_left_open_without() -> None:
    assert plan_options(replace(STAGED, micro_batches=1))["micro_batches"] == 1
    assert plan_options(FLAT)["micro_batches"] is None

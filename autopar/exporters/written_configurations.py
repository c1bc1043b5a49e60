"""A plan in the words of other tools: torchtitan, Megatron-LM, DeepSpeed, Accelerate, and torch itself.

    configuration(plan, uniform, "megatron")     --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 ...

Each tool has one function that returns the text of its file or flags, and sentences about what it cannot say. Names of
options are those of torchtitan's job configuration (2025), Megatron-LM core 0.14, DeepSpeed 0.17 and Accelerate 1.12.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from autopar.errors import ConfigurationError
from autopar.exporters.torch_code import fsdp2, parallelize_plan
from autopar.exporters.uniform import UniformPlan, cannot
from autopar.exporters.written_device_map import device_map
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import Way

TITAN_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble",
    "zb-h1": "InterleavedZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip
"""Families -> classes of torch.distributed.pipelining without "Schedule"."""
MEGATRON_SCHEDULES = ("1f1b", "interleaved")
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
ROTATIONS: Mapping[Way, str] = {"ring": "alltoall", "gather": "allgather"}
"""Ways of context parallelism -> what torch calls the exchange of keys and values (torchtitan, Accelerate)."""
EXCHANGES: Mapping[Way, str] = {"ring": "p2p", "ulysses": "a2a", "gather": "allgather"}
"""Ways of context parallelism -> `--cp-comm-type` of Megatron-LM; "a2a+p2p" splits heads in a ring."""
TWO_LEVELS = "a2a+p2p"

CAPACITY_FACTOR, PADS, DROP_POLICY = (
    "moe-expert-capacity-factor", "moe-pad-expert-input-to-capacity", "moe-token-drop-policy",
)  # fmt: skip
"""Flags of Megatron-LM: a capacity of experts; that every rank sends so many rows to each; whose rows are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """text: the file or the flags; lost: what the tool cannot express of the uniform configuration."""

    tool: str
    text: str
    lost: tuple[str, ...] = ()


Writer: TypeAlias = Callable[[Plan, UniformPlan], tuple[str, list[str]]]


def configuration(plan: Plan, uniform: UniformPlan, tool: str) -> Configuration:
    """The nearest configuration of a plan for one of `TOOLS`. Raises ConfigurationError for another name."""
    if tool not in TOOLS:
        raise ConfigurationError(f"no exporter for {tool!r}: write one of {', '.join(TOOLS)}")
    text, lost = TOOLS[tool](plan, uniform)
    return Configuration(tool=tool, text=text, lost=tuple(lost))


def torchtitan(_plan: Plan, uniform: UniformPlan) -> tuple[str, list[str]]:
    """Tables of a TOML file for `--job.config_file`. Tensor parallelism is with sequence parallelism there."""
    lost = _without_sequence_parallel(uniform)
    tables: dict[str, dict[str, object]] = {
        "parallelism": {
            "data_parallel_replicate_degree": uniform.dp_replicate,
            "data_parallel_shard_degree": uniform.dp_shard * uniform.ep,
            "fsdp_reshard_after_forward": "never" if uniform.zero_stage == 2 else "always",
            "tensor_parallel_degree": uniform.tp,
            "context_parallel_degree": uniform.cp,
            "expert_parallel_degree": uniform.ep * (uniform.cp * uniform.tp if uniform.ep > 1 else 1),
            "pipeline_parallel_degree": uniform.pp,
        },
        "training": {},
        "activation_checkpoint": {"mode": uniform.recompute},
    }
    if rotation := _rotation(uniform):
        tables["parallelism"]["context_parallel_rotate_method"] = rotation
    lost += _lost_of_context(uniform, ROTATIONS, always_shards=True)
    lost += _lost_of_experts(uniform, uniform.cp * uniform.tp, always_shards=True)
    if uniform.expert_capacity is not None:
        beyond = f"{uniform.expert_capacity:g} times an expert's even share"
        lost.append(f"rows beyond {beyond} are dropped in the plan only")
    if uniform.schedule is not None:
        name = TITAN_SCHEDULES.get(uniform.schedule)
        if name is None:
            lost.append(f"no schedule is like {uniform.schedule}: 1F1B takes its place")
        tables["parallelism"]["pipeline_parallel_schedule"] = name or "1F1B"
        if uniform.micro_batch is not None:
            tables["parallelism"]["pipeline_parallel_microbatch_size"] = uniform.micro_batch
    if uniform.batch is not None:
        parts = uniform.micro_batches if uniform.pp > 1 else 1
        tables["training"] |= {
            "local_batch_size": (uniform.micro_batch or 1) * parts,
            "global_batch_size": uniform.batch,
            "seq_len": uniform.sequence or 1,
        }
    tables["training"]["mixed_precision_param"] = "bfloat16" if uniform.precision == "bf16" else "float32"
    return "\n".join(_toml_table(name, values) for name, values in tables.items()), lost


def megatron(_plan: Plan, uniform: UniformPlan) -> tuple[str, list[str]]:
    """Flags of Megatron-LM's training scripts, one per line."""
    lost: list[str] = []
    flags: dict[str, object] = {
        "tensor-model-parallel-size": uniform.tp,
        "pipeline-model-parallel-size": uniform.pp,
        "context-parallel-size": uniform.cp,
        "expert-model-parallel-size": uniform.ep * (uniform.cp if uniform.ep > 1 else 1),
    }
    if uniform.cp_inner > 1:
        flags["cp-comm-type"] = TWO_LEVELS
        flags["hierarchical-context-parallel-sizes"] = f"{uniform.cp_inner} {uniform.cp // uniform.cp_inner}"
    elif uniform.asked_way is not None:
        flags["cp-comm-type"] = EXCHANGES[uniform.asked_way]
    lost += _lost_of_context(uniform, EXCHANGES, always_shards=uniform.zero_stage > 0, two_levels=True)
    lost += _lost_of_experts(uniform, uniform.cp, always_shards=uniform.zero_stage > 0)
    if uniform.expert_capacity is not None:
        flags |= {CAPACITY_FACTOR: uniform.expert_capacity, PADS: True, DROP_POLICY: "position"}
    if uniform.tp > 1 and uniform.sequence_parallel:
        flags["sequence-parallel"] = True
    if uniform.schedule is not None and uniform.schedule not in MEGATRON_SCHEDULES:
        lost.append(f"no schedule is like {uniform.schedule}: 1F1B, interleaved with several chunks, takes its place")
    if uniform.chunks > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = uniform.chunks
    if uniform.zero_stage:
        flags |= {"use-distributed-optimizer": True, "use-megatron-fsdp": True}
        flags["data-parallel-sharding-strategy"] = SHARDING[uniform.zero_stage]
        if uniform.dp_replicate > 1:
            flags["num-distributed-optimizer-instances"] = uniform.dp_replicate
        if uniform.pp > 1:
            lost.append(
                "Megatron FSDP does not shard parameters of pipelines: with stages only the optimizer is sharded"
            )
            flags["data-parallel-sharding-strategy"] = "optim"
    if uniform.recompute == "full":
        flags |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif uniform.recompute == "selective":
        flags["recompute-granularity"] = "selective"
    if uniform.batch is not None:
        flags |= {"micro-batch-size": uniform.micro_batch, "global-batch-size": uniform.batch}
    if uniform.precision == "bf16":
        flags["bf16"] = True
    return "\n".join(
        f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items()
    ) + "\n", lost


def deepspeed(_plan: Plan, uniform: UniformPlan) -> tuple[str, list[str]]:
    """The JSON of `deepspeed.initialize(config=...)`."""
    lost = cannot(uniform, "cp", "ep", "pp")
    if uniform.tp > 1 and uniform.zero_stage == 3:
        lost.append("AutoTP goes with ZeRO 1 and 2: parameters stay whole on the ranks of data parallelism")
    stage = min(uniform.zero_stage, 2) if uniform.tp > 1 else uniform.zero_stage
    document: dict[str, object] = {"zero_optimization": {"stage": stage}}
    if stage and uniform.dp_replicate > 1:
        document["zero_optimization"] = {"stage": stage, "mics_shard_size": uniform.dp_shard}
    if uniform.tp > 1:
        document["tensor_parallel"] = {"autotp_size": uniform.tp}
    if uniform.batch is not None:
        document |= {
            "train_batch_size": uniform.batch,
            "train_micro_batch_size_per_gpu": uniform.micro_batch,
            "gradient_accumulation_steps": uniform.micro_batches,
        }
    if uniform.precision == "bf16":
        document["bf16"] = {"enabled": True}
    if uniform.recompute != "none":
        lost.append(f"recomputation ({uniform.recompute}) is switched on in the model, not here")
    return json.dumps(document, indent=2) + "\n", lost


def accelerate(_plan: Plan, uniform: UniformPlan) -> tuple[str, list[str]]:
    """The YAML of `accelerate launch --config_file`, with FSDP2; Ulysses is DeepSpeed's there."""
    by_heads = uniform.asked_way == "ulysses"
    lost = cannot(uniform, "ep", "pp") + _without_sequence_parallel(uniform)
    if uniform.recompute == "selective":
        lost.append("selective recomputation: activation checkpointing is of whole blocks or off")
    if uniform.micro_batches > 1 and uniform.pp == 1:
        lost.append(f"{uniform.micro_batches} micro-batches: gradient_accumulation_steps is set in the script")
    sharded = uniform.zero_stage > 0
    if by_heads and uniform.tp > 1:
        lost.append(f"tensor parallelism of {uniform.tp}: sequence parallelism by heads runs without it")
    kind = "DEEPSPEED" if by_heads else "FSDP" if sharded or uniform.cp > 1 else "MULTI_GPU"
    lost += _lost_of_context(uniform, (*ROTATIONS, "ulysses"), always_shards=not by_heads or sharded)
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        f"mixed_precision: {'bf16' if uniform.precision == 'bf16' else 'no'}",
        f"num_processes: {uniform.num_devices // uniform.pp}",
    ]
    if by_heads:
        lines += ["deepspeed_config:", f"  zero_stage: {uniform.zero_stage}"]
    elif kind == "FSDP":
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {str(uniform.zero_stage == 3).lower()}",
            f"  fsdp_activation_checkpointing: {str(uniform.recompute == 'full').lower()}",
        ]
    lines += [
        "parallelism_config:",
        f"  parallelism_config_dp_replicate_size: {uniform.dp_replicate}",
        f"  parallelism_config_dp_shard_size: {uniform.dp_shard * uniform.ep}",
        f"  parallelism_config_tp_size: {uniform.tp}",
        f"  parallelism_config_{'sp' if by_heads else 'cp'}_size: {uniform.cp}",
    ]
    if by_heads:
        lines.append("  parallelism_config_sp_backend: deepspeed")
    elif rotation := _rotation(uniform):
        lines.append(f"  parallelism_config_cp_comm_strategy: {rotation}")
    return "\n".join(lines) + "\n", lost


def map_of_devices(plan: Plan, _uniform: UniformPlan) -> tuple[str, list[str]]:
    """The JSON of a device map of Accelerate."""
    found, lost = device_map(plan)
    return json.dumps(found, indent=2) + "\n", lost


TOOLS: Mapping[str, Writer] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "device_map": map_of_devices,
    "fsdp2": fsdp2,
    "parallelize_plan": parallelize_plan,
}


def _rotation(uniform: UniformPlan) -> str | None:
    return None if uniform.asked_way is None else ROTATIONS.get(uniform.asked_way)


def _lost_of_context(
    uniform: UniformPlan, ways: Collection[str], *, always_shards: bool, two_levels: bool = False
) -> Iterator[str]:
    """What a tool with words for these ways of context parallelism does otherwise. always_shards: parameters lie split
    over its ranks as over those of data parallelism."""
    if uniform.cp == 1:
        return
    if uniform.cp_way is not None and uniform.cp_way not in ways and not (two_levels and uniform.cp_inner > 1):
        yield f"attention over cp={uniform.cp} runs as {_way_in_words(uniform)}: no word for that, the default runs"
    yield from _lost_of_shards(f"cp={uniform.cp}", uniform.cp_shards, always_shards)


def _lost_of_experts(uniform: UniformPlan, beside: int, *, always_shards: bool) -> Iterator[str]:
    """What a tool does otherwise whose expert parallelism takes `beside` ranks of other kinds whole, and data
    parallelism's ranks beside these."""
    if uniform.ep == 1:
        return
    if beside > 1:
        yield (
            f"experts are split over ep={uniform.ep} in the plan; expert parallelism takes the {beside} ranks of "
            f"context and tensor parallelism too here: {uniform.ep * beside} parts"
        )
    yield from _lost_of_shards(f"ep={uniform.ep}", uniform.ep_shards, always_shards)


def _lost_of_shards(axis: str, in_plan: bool, here: bool) -> Iterator[str]:
    """That parameters (of no experts) lie otherwise over the ranks of an axis."""
    if here and not in_plan:
        yield f"parameters are whole over {axis} in the plan; they are sharded over these ranks here"
    elif in_plan and not here:
        yield f"parameters are split over {axis} in the plan; they are whole on these ranks here"


def _way_in_words(uniform: UniformPlan) -> str:
    """ "ulysses"; "ulysses over 2 ranks beside each other and a ring over 4 of these"; "different ways"."""
    if uniform.cp_inner > 1:
        outer = uniform.cp // uniform.cp_inner
        return f"ulysses over {uniform.cp_inner} ranks beside each other in a ring of {outer}"
    return "several ways" if uniform.cp_way == "mixed" else str(uniform.cp_way)


def _without_sequence_parallel(uniform: UniformPlan) -> list[str]:
    if uniform.tp > 1 and not uniform.sequence_parallel:
        return [
            "activations between blocks are whole in the plan; tensor parallelism is with sequence parallelism here"
        ]
    return []


def _toml_table(name: str, values: Mapping[str, object]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])

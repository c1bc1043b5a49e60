"""A plan's degrees from another tool's configuration: what `autopar import` prices as a baseline.

    uniform = read_configuration("--tensor-model-parallel-size 8 --bf16", "megatron", num_devices=64, origin="flags.sh")
    autopar.plan(model, inputs, cluster="8x8 H100-SXM", **plan_options(uniform))       # dp_replicate 8, tp 8, bf16

What `autopar.exporters` writes is read back with the same degrees. Sharded data parallelism is the axis dp_shard
whatever its stage is: whether gathered weights are kept (ZeRO-2) is the planner's choice. Schedules and names of
options are those named there. Settings that say nothing about parallelism (model, data, logging) are not read.
"""

from __future__ import annotations

import importlib
import itertools
import shlex
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from autopar.errors import ConfigurationError
from autopar.exporters.uniform import Recomputation, UniformPlan
from autopar.exporters.written_configurations import SHARDING, TITAN_SCHEDULES
from autopar.files import decoded_json
from autopar.importers.read_context import EXCHANGE_FLAGS, exchange, left_to_the_planner, rotation, sequence_ranks
from autopar.importers.read_device_map import stages_of_map
from autopar.importers.read_experts import capacity_elsewhere, expert_capacity, expert_ranks, experts_elsewhere
from autopar.importers.settings import Settings

PRECISIONS = {"bfloat16": "bf16", "float32": "fp32", "bf16": "bf16", "no": "fp32"}
RECOMPUTATIONS: Mapping[str, Recomputation] = {"none": "none", "selective": "selective", "full": "full"}
CODE = ("fsdp2", "parallelize_plan")
"""Exports that are Python."""

DEEPEST = 64
"""Levels of a YAML file."""

Reader: TypeAlias = Callable[[str, int, str], UniformPlan]


def read_configuration(text: str, tool: str, *, num_devices: int, origin: str) -> UniformPlan:
    """Degrees and options of a configuration; `lost` says what of it a plan is not told.

    num_devices: what data parallelism fills where the tool leaves it open. origin: the file, for errors.
    Raises ConfigurationError for what cannot be read, or not be expressed, with the setting's name.
    """
    if tool in CODE:
        raise ConfigurationError(
            f"{origin}: {tool} is Python, which is not read; say its mesh: autopar plan --dims dp_shard=4,tp=2"
        )
    if tool not in READERS:
        raise ConfigurationError(f"no importer for {tool!r}: write one of {', '.join(READERS)}")
    uniform = READERS[tool](text, num_devices, origin)
    if uniform.num_devices != num_devices:
        raise ConfigurationError(
            f"{origin}: the degrees {uniform.dims} make {uniform.num_devices} devices, the cluster has {num_devices}"
        )
    return uniform


def plan_options(uniform: UniformPlan) -> dict[str, Any]:
    """The arguments of `autopar.plan` that ask for this configuration."""
    says_parts = uniform.micro_batches > 1 or (uniform.pp > 1 and not uniform.stages)
    return {
        "dims": uniform.dims or {"dp_replicate": 1},
        "cp": uniform.asked_way,
        "ep": uniform.asked_expert_way,
        "expert_capacity": uniform.expert_capacity,
        "micro_batches": uniform.micro_batches if says_parts else None,
        "schedule": uniform.schedule,
        "recompute": uniform.recompute,
        "precision": uniform.precision,
    }


def torchtitan(text: str, num_devices: int, origin: str) -> UniformPlan:
    """A job configuration in TOML: [parallelism], [training] and [activation_checkpoint]."""
    document = _decoded(msgspec.toml.decode, text, origin, "TOML")
    parallel, training, checkpoints = (
        Settings(document.get(name, {}), f"{origin} [{name}]")
        for name in ("parallelism", "training", "activation_checkpoint")
    )
    parallel.refuse_above_one({"expert_tensor_parallel_degree": "tensor parallelism of experts alone"})
    parallel.refuse_where_on(
        ("pipeline_parallel_split_points", "module_fqns_per_model_part", "pipeline_parallel_schedule_csv"),
        "the planner cuts the model into stages itself",
    )
    training.refuse_where_on(("enable_cpu_offload",), "states live on the device")
    tp, pp = parallel.count("tensor_parallel_degree"), parallel.count("pipeline_parallel_degree")
    cp = parallel.count("context_parallel_degree")
    parallel.get("context_parallel_load_balancer")
    replicate, shard = _data_degrees(
        max(1, num_devices // (tp * pp * cp)),
        replicate=parallel.count("data_parallel_replicate_degree"),
        shard=parallel.open_count("data_parallel_shard_degree"),
    )
    ranks = replicate * shard
    ep = expert_ranks(parallel, "expert_parallel_degree", shard, beside=cp * tp)
    local, batch = training.optional_count("local_batch_size"), training.open_count("global_batch_size")
    size = parallel.optional_count("pipeline_parallel_microbatch_size")
    whole = batch if batch > 0 else None if local is None else local * ranks
    families = {name: family for family, name in TITAN_SCHEDULES.items()}
    parallel.get("fsdp_reshard_after_forward")
    return UniformPlan(
        dp_replicate=replicate,
        dp_shard=shard // ep,
        tp=tp,
        ep=ep,
        ep_shards=ep > 1,
        cp=cp,
        cp_way=rotation(parallel, "context_parallel_rotate_method", cp),
        cp_shards=cp > 1,
        pp=pp,
        zero_stage=3 if shard * cp > 1 else 0,
        schedule=parallel.one_of("pipeline_parallel_schedule", families, "1F1B") if pp > 1 else None,
        micro_batches=_parts(whole, ranks, (size or 1) if pp > 1 else local),
        batch=whole,
        sequence=training.optional_count("seq_len"),
        recompute=checkpoints.one_of("mode", RECOMPUTATIONS, "none"),
        precision=training.one_of("mixed_precision_param", PRECISIONS, "float32"),
        lost=(
            *_not_told(parallel, "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"),
            *left_to_the_planner(cp, order=True, shards=True),
            *experts_elsewhere(parallel, "expert_parallel_degree", beside=cp * tp),
        ),
    )


def megatron(text: str, num_devices: int, origin: str) -> UniformPlan:
    """Flags of a training script of Megatron-LM, in a file or a shell's line continuation."""
    flags = Settings(_flags(text, origin), origin)
    flags.refuse_above_one({"expert-tensor-parallel-size": "tensor parallelism of experts alone"})
    flags.refuse_where_on(
        ("pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
        "the planner cuts the model into stages itself",
    )
    flags.refuse_where_on(("fp16", "fp8-format", "fp4-format"), "an imported plan computes in fp32 or bf16")
    flags.refuse_where_on(("optimizer-cpu-offload", "cpu-offloading"), "states live on the device")
    tp, pp = flags.count("tensor-model-parallel-size"), flags.count("pipeline-model-parallel-size")
    strategy = flags.one_of("data-parallel-sharding-strategy", _STRATEGIES, "no_shard")
    sharded = strategy or bool(flags.get("use-distributed-optimizer"))
    instances = flags.count("num-distributed-optimizer-instances")
    cp = flags.count("context-parallel-size")
    way, inner = exchange(flags, cp)
    data = max(1, num_devices // (tp * pp * cp))
    replicate, shard = _data_degrees(data, replicate=instances if sharded else data, shard=-1)
    beside = cp * (1 if flags.get("expert-tensor-parallel-size") is None else tp)  # else that of all weights
    ep = expert_ranks(flags, "expert-model-parallel-size", shard if sharded else replicate, beside=beside)
    batch = flags.optional_count("global-batch-size")
    chunked = flags.optional_count("num-virtual-stages-per-pipeline-rank")
    layers = flags.get("num-layers-per-virtual-pipeline-stage")
    interleaved = layers is not None or (chunked or 1) > 1
    return UniformPlan(
        dp_replicate=replicate if sharded else replicate // ep,
        dp_shard=shard // ep if sharded else shard,
        tp=tp,
        ep=ep,
        ep_shards=sharded and ep > 1,
        expert_capacity=expert_capacity(flags, ep),
        cp=cp,
        cp_way=way,
        cp_inner=inner,
        cp_shards=sharded and cp > 1,
        pp=pp,
        zero_stage=3 if sharded and shard * cp > 1 else 0,
        sequence_parallel=bool(flags.get("sequence-parallel")),
        schedule=("interleaved" if interleaved else "1f1b") if pp > 1 else None,
        chunks=chunked or 1,
        micro_batches=_parts(batch, data, flags.optional_count("micro-batch-size")),
        batch=batch,
        sequence=flags.optional_count("seq-length"),
        recompute=flags.one_of("recompute-granularity", RECOMPUTATIONS, "none"),
        precision="bf16" if flags.get("bf16") else "fp32",
        lost=(
            *(["how many chunks a rank holds is the planner's choice"] if interleaved else ()),
            *left_to_the_planner(cp, order=way != "ulysses", shards=bool(sharded), levels=inner > 1),
            *experts_elsewhere(flags, "expert-model-parallel-size", beside=beside),
            *capacity_elsewhere(flags, ep),
        ),
    )


_STRATEGIES = {"no_shard": False, "optim": True, **dict.fromkeys(SHARDING.values(), True)}


def deepspeed(text: str, num_devices: int, origin: str) -> UniformPlan:
    """The JSON of `deepspeed.initialize(config=...)`."""
    document = Settings(decoded_json(text.encode(), origin), origin)
    zero = Settings(document.get("zero_optimization", {}), f"{origin} zero_optimization")
    zero.refuse_where_on(
        ("offload_optimizer", "offload_param", "cpu_offload", "zero_quantized_weights", "zero_quantized_gradients"),
        "states live on the device, and collectives move what was computed",
    )
    document.refuse_where_on(("pipeline",), "stages are asked for by dims pp")
    for half in ("fp16", "fp8"):
        if Settings(document.get(half, {}), f"{origin} {half}").get("enabled"):
            raise ConfigurationError(f"{origin}: {half} is enabled; an imported plan computes in fp32 or bf16")
    tensor = Settings(document.get("tensor_parallel", {}), f"{origin} tensor_parallel")
    tp, stage = tensor.count("autotp_size"), zero.count("stage", 0, least=0, most=3)
    data = max(1, num_devices // tp)
    groups = zero.open_count("mics_shard_size", zero.open_count("zero_hpz_partition_size"))
    shard = 1 if stage == 0 else groups if groups > 1 else data
    replicate, shard = _data_degrees(data, replicate=-1, shard=shard)
    batch = document.optional_count("train_batch_size")
    size, parts = (
        document.optional_count(f) for f in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if batch is None and size is not None:
        batch = size * (parts or 1) * data
    return UniformPlan(
        dp_replicate=replicate,
        dp_shard=shard,
        tp=tp,
        zero_stage=stage,
        micro_batches=parts or _parts(batch, data, size),
        batch=batch,
        precision="bf16" if Settings(document.get("bf16", {}), f"{origin} bf16").get("enabled") else "fp32",
        lost=(f"ZeRO-{stage}: gradients are reduced to where the states lie",) if stage in (1, 2) else (),
    )


def accelerate(text: str, num_devices: int, origin: str) -> UniformPlan:
    """The YAML of `accelerate launch --config_file`."""
    document = Settings(_decoded(_yaml, text, origin, "YAML"), origin)
    section = document.get("parallelism_config")
    degrees = Settings(section or {}, f"{origin} parallelism_config")
    prefix = "parallelism_config_"
    kinds = {"FSDP": True, "MULTI_GPU": False, "MULTI_CPU": False, "NO": False}
    if degrees.count(f"{prefix}sp_size") > 1:
        kinds["DEEPSPEED"] = _zero_stage(document, origin) > 0
    sharded = document.one_of("distributed_type", kinds, "MULTI_GPU")
    options = Settings(document.get("fsdp_config") or {}, f"{origin} fsdp_config")
    options.refuse_where_on(("fsdp_offload_params",), "states live on the device")
    tp = degrees.count(f"{prefix}tp_size")
    cp, way = sequence_ranks(degrees, prefix)
    data = max(1, num_devices // (tp * cp))
    wanted = [degrees.open_count(f"{prefix}{name}_size", 1) for name in ("dp_replicate", "dp_shard")]
    if not section:
        wanted = [1, data] if sharded else [data, 1]
    replicate, shard = _data_degrees(data, replicate=wanted[0], shard=wanted[1])
    processes = replicate * shard * cp * tp
    if processes != (said := document.count("num_processes", num_devices)):
        raise ConfigurationError(f"{origin}: its degrees make {processes} processes, num_processes is {said}")
    full = options.get("fsdp_activation_checkpointing") in (True, "true")
    return UniformPlan(
        dp_replicate=replicate,
        dp_shard=shard,
        tp=tp,
        cp=cp,
        cp_way=way,
        cp_shards=sharded and cp > 1,
        zero_stage=3 if sharded and shard * cp > 1 else 0,
        recompute="full" if full else "none",
        precision=document.one_of("mixed_precision", PRECISIONS, "no"),
        lost=left_to_the_planner(cp, order=way != "ulysses", shards=sharded),
    )


def _zero_stage(document: Settings, origin: str) -> int:
    """Of the DeepSpeed section of Accelerate, which runs Ulysses there."""
    options = Settings(document.get("deepspeed_config") or {}, f"{origin} deepspeed_config")
    options.refuse_where_on(("deepspeed_config_file",), "write its ZeRO stage as zero_stage here")
    for name in ("offload_optimizer_device", "offload_param_device"):
        options.refuse_where_on((name,), "states live on the device")
    return options.count("zero_stage", 2, least=0, most=3)


def device_map(text: str, _num_devices: int, origin: str) -> UniformPlan:
    """The JSON of a device map of Accelerate, `model.hf_device_map`: a stage per device, cut where the map does."""
    stages = stages_of_map(decoded_json(text.encode(), origin), origin)
    return UniformPlan(
        pp=1 + max(stages.values()),
        stages=stages,
        lost=(f"{origin}: a map runs one device after the other; stages take micro-batches, on a schedule",),
    )


READERS: Mapping[str, Reader] = {
    "torchtitan": torchtitan, "megatron": megatron, "deepspeed": deepspeed, "accelerate": accelerate,
    "device_map": device_map,
}  # fmt: skip


def _decoded(decode: Callable[[str], Any], text: str, origin: str, language: str) -> Any:
    try:
        return decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{origin} is no {language}: {error}") from error
    except ImportError as error:  # msgspec leaves TOML on Python 3.10, and YAML, to other libraries
        raise ConfigurationError(f"{origin}: {error}") from error


def _yaml(text: str) -> Any:
    """A YAML document. Raises ValueError for keys that stand twice, which YAML's reader takes the last of, for aliases,
    by which a line can name a document of any size, and for deep nesting."""
    yaml = importlib.import_module("yaml")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                raise ValueError(f"an alias, or more than {DEEPEST} levels ({event.start_mark.line + 1}. line)")
        _refuse_twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return msgspec.yaml.decode(text)


def _refuse_twice(node: Any) -> None:
    """node: of PyYAML; a mapping holds pairs, a sequence nodes, a scalar text."""
    if node is None or isinstance(node.value, str):
        return
    pairs = [each for each in node.value if isinstance(each, tuple)]
    names = [str(key.value) for key, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]!r} stands twice")
    for each in [value for _, value in pairs] if pairs else node.value:
        _refuse_twice(each)


def _flags(text: str, origin: str) -> dict[str, Any]:
    """`--name value` and `--name` pairs of a command line, lists for flags that take several; backslashes join lines,
    other words are passed over."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigurationError(f"{origin} is no command line: {error}") from error
    found: dict[str, Any] = {}
    for position, (word, following) in enumerate(zip(words, [*words[1:], "--"], strict=True)):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            if name in EXCHANGE_FLAGS:
                behind = itertools.takewhile(lambda other: not other.startswith("--"), words[position + 1 :])
                found[name] = [value] if equals else list(behind)
            else:
                found[name] = value if equals else True if following.startswith("--") else following
    if not found:
        raise ConfigurationError(f"{origin} holds no flag: write them as --tensor-model-parallel-size 8")
    return found


def _data_degrees(data: int, *, replicate: int, shard: int) -> tuple[int, int]:
    """Replicated and sharded ranks of data parallelism; -1 takes what is left of `data`."""
    if shard == -1:
        shard = max(1, data // replicate)
    if replicate == -1:
        replicate = max(1, data // shard)
    return replicate, shard


def _parts(batch: int | None, data_ranks: int, size: int | None) -> int:
    """Micro-batches of `size` samples a rank; one where nothing says how large they are."""
    return 1 if batch is None or size is None else max(1, batch // (data_ranks * size))


def _not_told(settings: Settings, *only_with_stages: str) -> tuple[str, ...]:
    """A sentence about settings of parallelism that a plan decides by itself."""
    names = [name for name in settings.unread if name not in only_with_stages]
    return (f"{settings.where}: not read: {', '.join(names)}",) if names else ()

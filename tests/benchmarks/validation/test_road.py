"""Published plans as lowered programs, and the seconds that are made of them; small GPTs on eight A100."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autopar.cost_models.program_costs import collective_of
from autopar.errors import ConfigurationError
from autopar.graphs.operator_names import base_name, is_causal
from autopar.hardware.cluster import Cluster
from autopar.passes.module_segments import segment_of
from benchmarks.validation.lowered import LoweredRun, lowered
from benchmarks.validation.road import run_actions, segment_costs, stage_costs, step_seconds
from benchmarks.validation.runs import ModelShape, ParallelShape, Stack, StateSpace, TrainingRun

GPT = ModelShape(family="gpt", hidden=512, ffn=2048, layers=4, heads=8, kv_heads=8, vocab=2048, seq_len=256)
GRAPHED = Stack(name="megatron", dtype="float16", attention="unfused", cuda_graph="step")
"""No host: seconds are those of the device."""


def run(model: ModelShape = GPT, stack: Stack = GRAPHED, **parallel: object) -> TrainingRun:
    shape = ParallelShape(micro_batch=2, **parallel)  # type: ignore[arg-type]
    return TrainingRun(model=model, parallel=shape, stack=stack, cluster=Cluster.parse("1x8 A100-80"))


def collectives(low: LoweredRun, segment: str, axis: str) -> dict[str, Counter[str]]:
    """Pass -> how often each collective runs over an axis in one segment; small sums of statistics left out."""
    assert low.partition.backward is not None
    found = {}
    for phase, module in (("forward", low.partition.forward), ("backward", low.partition.backward)):
        found[phase] = Counter(
            kind
            for node in module.graph.nodes
            if (kind := collective_of(node)) is not None
            and node.meta["group_axes"] == (axis,)
            and segment_of(node.meta["operator"]) == segment
            and len(node.meta["local_shape"]) > 1
        )
    return found


def test_a_published_run_has_no_kernels_of_ours() -> None:
    low = lowered(run())
    names = {base_name(node.target) for part in low.partition.graphs for node in part.graph.nodes}
    assert {"gelu", "native_layer_norm", "native_layer_norm_backward"} <= names
    assert not names & {"add_layer_norm", "layer_norm_backward", "cross_entropy_rows", "cross_entropy_backward"}


def test_megatron_sums_twice_per_layer_and_pass() -> None:
    found = collectives(lowered(run(tp=2)), "layers.0", "tp")
    assert found == {"forward": {"all_reduce": 2}, "backward": {"all_reduce": 2}}


def test_sequence_parallelism_turns_each_sum_into_a_pair() -> None:
    found = collectives(lowered(run(tp=2, sequence_parallel=True)), "layers.0", "tp")
    assert found["forward"] == {"all_gather": 2, "reduce_scatter": 2}
    assert found["backward"]["reduce_scatter"] == 2
    # two for the gradients of row-split products, two because weight gradients read the gathered inputs again
    assert found["backward"]["all_gather"] == 4


def test_zero3_gathers_in_both_passes_and_scatters_gradients() -> None:
    found = collectives(lowered(run(dp=4, zero_stage=3)), "layers.0", "dp_shard")
    assert found["forward"] == {"all_gather": 4}  # the four matrices; vectors have one dim
    assert found["backward"]["all_gather"] == 4
    assert found["backward"]["reduce_scatter"] >= 4


def test_plain_data_parallelism_gathers_nothing() -> None:
    found = collectives(lowered(run(dp=4)), "layers.0", "dp_replicate")
    assert not found["forward"]
    assert set(found["backward"]) == {"all_reduce"}


def test_full_recomputation_runs_forward_of_a_layer_again() -> None:
    plain, again = (segment_costs(run(recompute=mode), "t0")["layers.0"] for mode in ("none", "full"))
    assert sum(again.forward.kernels) == pytest.approx(sum(plain.forward.kernels), rel=0.03)
    added = sum(again.backward.kernels) - sum(plain.backward.kernels)
    assert 0.7 * sum(plain.forward.kernels) < added <= 1.01 * sum(plain.forward.kernels)


def test_selective_recomputation_runs_no_product_of_weights_again() -> None:
    def products(mode: str) -> int:
        actions = run_actions(one := run(recompute=mode), lowered(one), "t0")
        return sum(a.kind == "mm" for a in actions if a.phase == "backward")

    assert products("selective") == products("none") < products("full")


def test_a_step_is_embedding_layers_and_head() -> None:
    two, four, six = (step_seconds(run(replace(GPT, layers=n)), "t0") for n in (2, 4, 6))
    assert four - two == pytest.approx(six - four, rel=1e-6)
    assert two > four - two


def test_a_pipeline_waits_for_its_bubble() -> None:
    (whole,), parts = stage_costs(run(), "t0"), stage_costs(run(pp=2), "t0")
    assert sum(s.forward_seconds for s in parts) == pytest.approx(whole.forward_seconds)
    steps = [step_seconds(run(pp=2, micro_batches=m), "t0") for m in (1, 2, 8)]
    assert steps[0] < steps[1] < 2 * steps[0]
    assert steps[2] < 8 * steps[0]


def test_a_host_that_launches_slowly_bounds_small_kernels() -> None:
    eager = replace(GRAPHED, name="megatron-deepspeed", cuda_graph="none")
    kernels = sum(len(c.forward.kernels) + len(c.backward.kernels) for c in segment_costs(run(), "t0").values())
    assert step_seconds(run(stack=eager), "t0") > kernels * 50e-6 > step_seconds(run(), "t0")
    assert step_seconds(run(stack=eager), "physics") < kernels * 50e-6


def test_what_no_plan_can_say_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="pipelines of encoder and decoder are not built"):
        step_seconds(run(replace(GPT, family="t5", decoder_seq_len=256), pp=2), "t0")
    with pytest.raises(ConfigurationError, match="needs the length of its decoder's sequences"):
        step_seconds(run(replace(GPT, family="t5")), "t0")


@pytest.mark.exhaustive(sample="gpt")
@pytest.mark.parametrize(("family", "masked"), [("gpt", {True}), ("bert", {False}), ("t5", {True, False})])
def test_only_decoders_hide_later_positions(family: str, masked: set[bool]) -> None:
    shape = replace(GPT, family=family, decoder_seq_len=256 if family == "t5" else 0)
    low = lowered(run(shape, replace(GRAPHED, attention="flash")))
    calls = [n for n in low.partition.forward.graph.nodes if "attention" in str(n.target)]
    assert {is_causal(call) for call in calls} == masked
    encoders = [call for call in calls if family == "t5" and call.meta["operator"].startswith("layers.0.")]
    assert not any(map(is_causal, encoders))


def test_a_hybrid_runs_each_mixer_as_often_as_its_pattern_says() -> None:
    sizes = StateSpace(heads=16, head_dim=64, state=64, groups=4)
    hybrid = replace(GPT, family="hybrid", state_space=sizes, pattern="M-M*M-", layers=6)
    parts = segment_costs(run(hybrid), "t0")
    assert len(parts) == 5  # embedding, three kinds of layers, head
    (whole,) = stage_costs(run(hybrid), "t0")
    (more,) = stage_costs(run(replace(hybrid, pattern="M-M*M-M", layers=7)), "t0")
    mamba = parts["layers.0"]
    assert more.forward_seconds - whole.forward_seconds == pytest.approx(sum(mamba.forward.kernels))


def test_adapters_need_no_gradients_of_frozen_weights() -> None:
    one = run()
    whole, frozen = segment_costs(one, "t0")["layers.0"], segment_costs(replace(one, adapter_rank=16), "t0")["layers.0"]
    assert sum(whole.forward.kernels) < sum(frozen.forward.kernels)
    assert len(frozen.backward.kernels) <= len(whole.backward.kernels) - 4
    assert stage_costs(replace(one, adapter_rank=16), "t0")[0].once_seconds == 0.0

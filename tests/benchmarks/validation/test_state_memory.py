"""Model states of a rank: Muon's moments, whole parameters handed out, and blocks beyond their requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.hardware.cluster import Cluster
from benchmarks.validation.program_memory import SegmentMemory
from benchmarks.validation.runs import Experts, ModelShape, ParallelShape, Stack, TrainingRun
from benchmarks.validation.state_memory import (
    adapter_elements,
    blocks_beyond_states,
    stage_states,
    transposed_bytes,
    widened_bytes,
)

MIB = 1 << 20
RUN = TrainingRun(
    model=ModelShape(
        family="gpt", hidden=8, ffn=32, layers=1, heads=1, kv_heads=1, vocab=16, seq_len=8, tied_embeddings=True
    ),
    parallel=ParallelShape(dp=2),
    stack=Stack(name="megatron"),
    cluster=Cluster.parse("1x2 H100-SXM"),
)  # fmt: skip


def piece(name: str, saved: tuple[int, ...] = (), **parameters: int) -> SegmentMemory:
    named = {f"{name}.{key}.weight": elements for key, elements in parameters.items()}
    return SegmentMemory(
        name=name, parameter_elements=sum(named.values()), parameters=named, saved_sizes=saved, saved_bytes=sum(saved)
    )


HELD = [piece("embedding", words=100), piece("layers.0", qkv=30, norm1=10)]


def test_muon_keeps_one_moment_of_matrices_inside_of_layers() -> None:
    assert stage_states(HELD, RUN) == 18 * 140
    assert stage_states(HELD, replace(RUN, optimizer="Muon")) == 18 * 110 + (18 - 4) * 30


def test_whole_parameters_are_handed_out_back_and_forth_by_size() -> None:
    """10, 30 and 100 elements go to ranks 0, 1 and 1."""
    cut = replace(RUN, parallel=replace(RUN.parallel, zero_stage=1))
    assert stage_states(HELD, replace(cut, optimizer="Muon by layers")) == 6 * 140 + 8 * 30 + 12 * 100
    assert stage_states(HELD, replace(cut, optimizer="Muon")) == 6 * 140 + (8 * 30 + 12 * 110) / 2


@pytest.mark.parametrize(
    ("elements", "saved", "beyond"),
    [
        (MIB // 8, (), 0),  # up to 1 MiB: blocks of their own size
        (4 * MIB - 4000, (), 4 * 16000),  # 16 MiB less 16 kB, four times: gradient, master, two moments
        (4 * MIB, (16 * MIB + 1, 16 * MIB + 1), 0),  # moments in segments of 18 MiB, of which 2 MiB are split off
        (4 * MIB, (17 * MIB, 17 * MIB), 0),  # the same: segments are whole 2 MiB
        (MIB * 17 // 4, (18 * MIB, 18 * MIB), 2 * MIB),  # 17 of 18 MiB: the rest is too small, twice for moments
    ],
)
def test_blocks_of_lasting_tensors_count_what_cannot_be_split_off(
    elements: int, saved: tuple[int, ...], beyond: int
) -> None:
    held = [piece("layers.0", saved, qkv=elements)]
    found = blocks_beyond_states(held, RUN)
    made = 2 * MIB if elements == MIB * 17 // 4 else 0  # gradient buffer and master copy of 17 MiB: segments of 18
    assert found == pytest.approx(beyond + made, abs=5 * 512)
    cut = replace(RUN, parallel=replace(RUN.parallel, zero_stage=1))
    assert blocks_beyond_states(held, cut) == 0


def test_adam_with_16_bit_moments_widens_both_for_the_larger_group() -> None:
    stack = Stack(name="megatron", gradient_bytes=2, optimizer_bytes=6.0, precision_aware=True)
    experts = Experts(count=4, per_token=1, hidden=8)
    run = replace(RUN, stack=stack, model=replace(RUN.model, family="moe", experts=experts))
    routed = SegmentMemory(name="layers.1", parameter_elements=500, parameters={"layers.1.mlp.down": 500})
    assert widened_bytes([*HELD, routed], run) == 8 * 500
    assert widened_bytes(HELD, run) == 8 * 140
    assert widened_bytes(HELD, replace(run, stack=replace(stack, precision_aware=False))) == 4 * 140


def test_hopper_keeps_float8_weights_of_layers_transposed_too() -> None:
    narrow = replace(RUN, stack=Stack(name="megatron", dtype="float8", keeps_transposes=True))
    assert transposed_bytes(HELD, narrow) == 40  # of the layer alone
    assert transposed_bytes(HELD, RUN) == 0


def test_adapters_have_gradients_and_moments_and_frozen_weights_have_none() -> None:
    adapted = replace(RUN, adapter_rank=2)
    elements = 2 * (4 * 8 + 8 * (2 + 2) + 3 * 32)
    assert adapter_elements(HELD, adapted) == elements
    assert stage_states(HELD, adapted) == 2 * 140 + 18 * elements
    assert blocks_beyond_states(HELD, adapted) == widened_bytes(HELD, adapted) == 0

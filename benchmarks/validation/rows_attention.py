"""Rows of causal attention of one sequence that several GPUs share, and the naive baseline of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.operator_costs import matmul_flops_per_second
from autopar.hardware.devices import preset_device
from benchmarks.validation.fields import Row, Unpredictable, integer, text
from benchmarks.validation.operators import VENDOR_FRACTION
from benchmarks.validation.schemas import Schema

GPU, RANKS = "A100-80", 8
"""USP's machine: eight A100-SXM4-80GB behind NVSwitches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One attention; `ulysses` ranks share the heads, the ring has the others."""

    batch: int
    tokens: int
    heads: int
    key_heads: int
    width: int
    ulysses: int


def naive_values(row: Row, schema: Schema) -> Mapping[str, float]:
    """The causal half of the pairs at the vendor's peak on all ranks, no exchange."""
    asked = shared_of(row)
    flops = 4 * asked.batch * asked.heads * asked.tokens**2 * asked.width / 2
    peak = VENDOR_FRACTION * matmul_flops_per_second(preset_device(GPU), "bfloat16")
    return dict.fromkeys(schema.measured["attention"], RANKS * peak / flops)


def shared_of(row: Row) -> Shared:
    """What a row says. Raises Unpredictable where it says nothing that can be."""
    heads, groups, ulysses = (integer(row, column) for column in ("heads", "group_num", "ulysses_degree"))
    tokens = text(row, "seq_len")
    length = int(tokens[:-1]) * 1024 if tokens.endswith("K") else integer(row, "seq_len")
    if heads % groups or RANKS % ulysses:
        raise Unpredictable(f"{heads} heads in groups of {groups}, {ulysses} of {RANKS} ranks share them")
    return Shared(
        batch=integer(row, "batch"), tokens=length, heads=heads, key_heads=heads // groups,
        width=integer(row, "head_dim"), ulysses=ulysses,
    )  # fmt: skip

"""Casts of narrow products: by scale, once per operand, not behind norms of Transformer Engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.program_costs import ProgramAction
from benchmarks.validation.quantization import CAST_BYTES, narrowed
from benchmarks.validation.runs import Stack

RATE = 1e12


def product(name: str, phase: str = "forward", seconds: float = 1.0, **more: object) -> ProgramAction:
    return ProgramAction(
        name=name, phase=phase, stream="compute", seconds=seconds, kind="mm", operand_elements=1e12, **more
    )  # type: ignore[arg-type]


def cast(action: ProgramAction, **stack: object) -> float:
    """Seconds beside the narrow product."""
    wide = replace(action, seconds=2.0)
    changed = Stack(name="any", dtype="float8", scaling="tensor", **stack)  # type: ignore[arg-type]
    (found,) = narrowed([action], [wide], changed, RATE)
    return found.seconds - 1.0


def test_a_cast_moves_the_bytes_of_its_scale() -> None:
    assert cast(product("layers.0.attention.out/mm#0")) == pytest.approx(CAST_BYTES["tensor"])
    assert cast(product("layers.0.attention.out/mm#0", "backward")) == pytest.approx(CAST_BYTES["tensor"])


def test_an_arriving_gradient_is_cast_once_for_both_its_products() -> None:
    assert cast(product("layers.0.attention.out/mm#0", "backward", weight_only=True)) == 0.0


def test_norms_and_activations_of_transformer_engine_hand_on_narrow_values() -> None:
    for name in ("layers.0.attention.qkv/mm#0", "layers.0.mlp.up/mm#0", "layers.0.mlp.down/mm#0"):
        assert cast(product(name)) == 0.0
        assert cast(product(name), kernels="inductor") > 0.0
    assert cast(product("layers.0.mlp.down/mm#0", "backward")) > 0.0


def test_the_head_and_routers_stay_in_16_bits() -> None:
    assert cast(product("head.output/mm#0")) == cast(product("layers.0.mlp.router/mm#0")) == 1.0

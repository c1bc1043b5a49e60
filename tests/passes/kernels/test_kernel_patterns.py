"""T5 writes its norm and its loss with other casts than Llama: the same kernels take them, and round where it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture import capture
from autopar.passes.kernels.graph_patterns import name_of
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.plans.plan_entries import KERNELS
from autopar.program import Program
from benchmarks.models import LossOnly, t5
from tests.passes.hand_plans import tensors_of

WORDS, BATCH, LENGTH = 512, 4, 16
KINDS = ("rms_norm", "cross_entropy")


def captured(dtype: torch.dtype, hides_logits: bool = False) -> tuple[Program, dict[str, Tensor]]:
    """(a T5 of one layer each way with a loss in `dtype`, the values of its inputs); half of the labels are ignored."""
    torch.manual_seed(0)
    module: nn.Module = t5(layers=1, width=64, heads=4, vocabulary=WORDS).to(dtype)
    module = LossOnly(module) if hides_logits else module
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH))
    inputs = {"input_ids": tokens, "labels": torch.where(torch.arange(LENGTH) % 2 == 0, tokens, -100)}
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in name else weight)
    program = capture(module, (), inputs)
    return program, tensors_of(program, module, inputs)


def computed(program: Program, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and gradients by name."""
    given = [tensors.get(i.name, torch.ones(i.shape, dtype=i.dtype)) for i in program.inputs]
    values = fx.Interpreter(program.graph_module).run(*given)
    return {f"{o.role} {o.name}": value for o, value in zip(program.outputs, values, strict=True)}


def names(program: Program) -> Counter[str]:
    return Counter(name_of(node) for node in program.graph.nodes)


def distance(found: dict[str, Tensor], exact: dict[str, Tensor], roles: Collection[str]) -> float:
    """The largest relative difference of a value of these roles."""
    pairs = [(value.double(), exact[name].double()) for name, value in found.items() if name.split()[0] in roles]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_norm_and_the_loss_of_a_t5_are_kernels(dtype: torch.dtype) -> None:
    found = names(with_kernels(captured(dtype)[0], KINDS))
    assert found["rms_norm"] == found["rms_norm_backward"] == 7
    assert found["cross_entropy"] == found["cross_entropy_backward"] == 1
    assert found["rsqrt"] == found["amax"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_forward_in_bf16_has_the_bits_of_the_model_and_gradients_are_no_farther_from_exact_ones(kind: str) -> None:
    program, tensors = captured(torch.bfloat16)
    plain, ours = computed(program, tensors), computed(with_kernels(program, (kind,)), tensors)
    for name, value in plain.items():
        assert name.startswith("gradient") or torch.equal(value, ours[name]), name
    wide = {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}
    exact = computed(captured(torch.float64)[0], wide)
    assert 0 < distance(ours, exact, ["gradient"]) <= distance(plain, exact, ["gradient"]) * 1.02 < 0.2


def test_in_fp32_all_results_are_those_of_the_model() -> None:
    program, tensors = captured(torch.float32)
    plain, ours = computed(program, tensors), computed(with_kernels(program, KINDS), tensors)
    assert distance(ours, plain, ["loss", "output", "gradient"]) < 1e-5


def test_a_loss_in_bf16_joins_the_product_with_the_vocabulary() -> None:
    program, tensors = captured(torch.bfloat16, hides_logits=True)
    chunks = with_kernels(program, KERNELS)
    assert names(chunks)["linear_cross_entropy"] == names(chunks)["linear_cross_entropy_backward"] == 1
    plain, ours = computed(program, tensors), computed(chunks, tensors)
    assert distance(ours, plain, ["loss"]) < 0.01
    assert distance(ours, plain, ["gradient"]) < 0.1


def test_a_norm_that_rounds_elsewhere_is_left_alone() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))  # fp32: the result is wider than the row

        def forward(self, x: Tensor) -> Tensor:
            rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            return (self.weight * (x * rstd)).sum()

    program = capture(Wide(), (torch.randn(4, 16, dtype=torch.bfloat16),), {})
    assert with_kernels(program, KINDS) is program

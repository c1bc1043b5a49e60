"""Saved values in less room: the mean of what was rounded is exact, no rank draws another's numbers, bits are all."""

from __future__ import annotations

import math

import pytest
import torch

from autopar.ops.random_index import Runs, full_runs
from autopar.ops.saved_forms import (
    GROUP,
    flat_runs,
    nested_runs,
    pack_bits,
    packed_bytes,
    round_groups,
    rounded_by_index,
    rounded_bytes,
    unpack_bits,
    unround_groups,
)

BITS = (8, 4, 2)


def seed(number: int = 5) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int64)


def again(x: torch.Tensor, bits: int, number: int = 5) -> torch.Tensor:
    """Rounded, and as it is read."""
    kept = rounded_by_index(x, bits, seed(number), 3, full_runs(x.shape), tuple(x.shape))
    return unround_groups(kept, bits, x.shape, x.dtype)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(4, 64), (3, 100), (7,), (2, 3, 512)])
def test_a_value_goes_to_a_neighbouring_step(bits: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found = again(x, bits)
    groups = torch.split(x.reshape(-1), GROUP)
    steps = torch.cat([(one.max() - one.min()).expand(len(one)) / (2**bits - 1) for one in groups])
    assert ((found - x).abs().reshape(-1) <= steps * (1 + 1e-5)).all()
    assert not torch.equal(found, x)


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_over_draws_is_the_value(bits: int) -> None:
    x, draws = torch.randn(2, GROUP), 400
    found = torch.stack([again(x, bits, number) for number in range(draws)]).double()
    step = ((x.amax(1) - x.amin(1)) / (2**bits - 1)).unsqueeze(1)
    fraction = ((x - x.amin(1, keepdim=True)) / step) % 1
    deviation = step * (fraction * (1 - fraction)).sqrt()
    off = (found.mean(0) - x) / (deviation / math.sqrt(draws) + 1e-6)
    assert off.abs().max() < 5
    assert off.square().mean() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_what_was_said(bits: int) -> None:
    for count in (1, GROUP, GROUP + 1, 1000):
        kept = rounded_by_index(torch.randn(count), bits, seed(), 0, full_runs((count,)), (count,))
        assert (kept.nbytes, kept.dtype) == (rounded_bytes(count, bits), torch.uint8)
        assert pack_bits(torch.randn(count)).nbytes == packed_bytes(count)


def test_ends_of_a_group_and_equal_values_are_exact() -> None:
    x = torch.cat((torch.full((GROUP,), 1.7), torch.tensor([0.0, 3.0]).repeat(GROUP // 2)))
    assert torch.allclose(again(x, 2), x, rtol=1e-6)
    assert (again(torch.relu(torch.randn(GROUP)), 4) >= 0).all()


def test_what_is_not_finite_stays_so() -> None:
    x = torch.zeros(GROUP)
    x[3] = math.inf
    assert not torch.isfinite(again(x, 8)).all()


def test_a_block_draws_the_numbers_of_the_whole() -> None:
    x = torch.randn(6, 2 * GROUP)
    whole = again(x, 4)
    for dim, start in ((0, 0), (0, 3), (1, 0), (1, GROUP)):
        block = x.narrow(dim, start, x.shape[dim] // 2)
        runs = tuple(((start, length),) if at == dim else ((0, length),) for at, length in enumerate(block.shape))
        kept = rounded_by_index(block, 4, seed(), 3, runs, (6, 2 * GROUP))
        mine = whole.narrow(dim, start, x.shape[dim] // 2)
        assert torch.equal(unround_groups(kept, 4, block.shape, x.dtype), mine)


def test_other_seeds_and_salts_draw_others() -> None:
    x = torch.randn(GROUP)
    kept = [
        rounded_by_index(x, 4, seed(s), salt, full_runs(x.shape), x.shape) for s, salt in ((1, 1), (1, 2), (2, 1))
    ]
    assert not any(torch.equal(one, other) for one, other in ((kept[0], kept[1]), (kept[0], kept[2])))


def test_runs_come_back() -> None:
    runs: Runs = (((0, 4),), ((1, 2), (8, 3)), ((5, 1),))
    assert nested_runs(flat_runs(runs)) == runs


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_bits_are_those_that_backward_of_relu_asks_for(dtype: torch.dtype) -> None:
    x = torch.randn(3, 13).to(dtype) if dtype != torch.bool else torch.rand(3, 13) < 0.5
    found = unpack_bits(pack_bits(x), x.shape, dtype)
    assert found.dtype == dtype
    assert torch.equal(found > 0, x > 0)
    if dtype != torch.bool:
        x.view(-1)[:2] = torch.tensor([math.nan, -0.0])
        grad = torch.randn(3, 13).to(dtype)
        packed = unpack_bits(pack_bits(x), x.shape, dtype)
        plain, mine = (torch.ops.aten.threshold_backward(grad, of, 0) for of in (x, packed))
        assert torch.equal(plain, mine)


def test_operators_are_well_formed() -> None:
    x = torch.randn(3, 5)
    torch.library.opcheck(round_groups, (x, 4, seed(), 1, [3, 5], flat_runs(full_runs((3, 5)))))
    kept = rounded_by_index(x, 4, seed(), 1, full_runs((3, 5)), (3, 5))
    torch.library.opcheck(unround_groups, (kept, 4, [3, 5], torch.float32))
    torch.library.opcheck(pack_bits, (x,))
    torch.library.opcheck(unpack_bits, (pack_bits(x), [3, 5], torch.bool))

"""What is drawn has the distribution it should have; call sites, draws, seeds and neighbours are independent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.ops.random import exponential_by_index, integers_by_index, normal_by_index, uniform_by_index
from autopar.ops.random_index import full_runs

COUNT = 200_000
SHAPE = (COUNT,)
Draw = Callable[..., Tensor]


def draw(by_index: Draw, *leading: object, dtype: torch.dtype = torch.float64, salt: int = 1, seed: int = 11) -> Tensor:
    return by_index(*leading, dtype, salt, torch.tensor(seed), full_runs(SHAPE), SHAPE)


def kolmogorov_distance(values: Tensor, distribution: Callable[[Tensor], Tensor]) -> float:
    """Largest difference between the distribution and that of the values, times sqrt(count)."""
    expected = distribution(values.double().sort().values)
    steps = torch.arange(1, COUNT + 1) / COUNT
    return float(torch.maximum((steps - expected).abs(), (steps - 1 / COUNT - expected).abs()).max()) * math.sqrt(COUNT)


DISTRIBUTIONS: list[tuple[Draw, Callable[[Tensor], Tensor], float, float]] = [
    (uniform_by_index, lambda x: x, 0.5, 1 / 12),
    (normal_by_index, torch.special.ndtr, 0.0, 1.0),
    (exponential_by_index, lambda x: 1 - torch.exp(-x), 1.0, 1.0),
]


@pytest.mark.parametrize(("by_index", "distribution", "mean", "variance"), DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [0, 11])
def test_distribution(
    by_index: Draw,
    distribution: Callable[[Tensor], Tensor],
    mean: float,
    variance: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    values = draw(by_index, dtype=dtype, seed=seed)
    assert values.dtype == dtype
    assert kolmogorov_distance(values, distribution) < 1.95  # exceeded by chance in 1 of 1000 seeds
    assert abs(float(values.double().mean()) - mean) < 4 * math.sqrt(variance / COUNT)
    assert abs(float(values.double().var()) - variance) < 0.02 * variance


def test_the_distance_sees_a_wrong_distribution() -> None:
    assert kolmogorov_distance(draw(uniform_by_index) * 0.99, lambda x: x) > 1.95


@pytest.mark.parametrize("by_index", [uniform_by_index, normal_by_index, exponential_by_index])
def test_salts_seeds_and_neighbours_are_independent(by_index: Draw) -> None:
    streams = [draw(by_index, salt=salt, seed=seed) for salt, seed in [(1, 11), (2, 11), (1, 12), (1, 11 + 1_000_003)]]
    pairs = [*itertools.combinations(streams, 2), *((s[:-lag], s[lag:]) for s in streams for lag in (1, 2, 3, 4, 8))]
    for first, second in pairs:
        correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
        assert abs(correlation) < 4.5 / math.sqrt(COUNT)


def test_narrow_uniform_values_stay_below_one() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        values = draw(uniform_by_index, dtype=dtype)
        assert float(values.max()) < 1.0
        assert float(values.min()) >= 0.0


def test_exponential_values_have_a_logarithm() -> None:
    assert bool(draw(exponential_by_index, dtype=torch.float32).log().isfinite().all())


def test_integers_are_equally_frequent() -> None:
    values = draw(integers_by_index, -3, 17, dtype=torch.int64)
    counts = torch.bincount(values + 3, minlength=20).double()
    assert (int(values.min()), int(values.max())) == (-3, 16)
    assert float(((counts - COUNT / 20) ** 2 / (COUNT / 20)).sum()) < 43.8  # chi-square, 19 degrees, 1 in 1000


def test_wide_integers_fill_their_range() -> None:
    low, high = -5, 2**45
    values = draw(integers_by_index, low, high, dtype=torch.int64)
    assert int(values.min()) >= low
    assert int(values.max()) < high
    assert kolmogorov_distance(values, lambda x: (x - low) / (high - low)) < 1.95


@pytest.mark.parametrize("runs", [(((2, 3),), ((0, 5),)), (((0, 2), (5, 1)), ((1, 1), (3, 2)))])
def test_a_block_draws_what_the_whole_draws(runs: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    shape, seed = (7, 5), torch.tensor(3)
    rows, columns = ([i for start, length in dim for i in range(start, start + length)] for dim in runs)
    for by_index in (uniform_by_index, normal_by_index, exponential_by_index):
        whole = by_index(torch.float64, 4, seed, full_runs(shape), shape)
        torch.testing.assert_close(by_index(torch.float64, 4, seed, runs, shape), whole[rows][:, columns])

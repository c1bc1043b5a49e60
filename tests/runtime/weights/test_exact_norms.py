"""A norm as a sum of integers: torch's value, and the same bits for any blocks."""

from __future__ import annotations

import math

import pytest
import torch

from autopar.errors import ConfigurationError
from autopar.runtime.weights.exact_norms import exact_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_does_not_depend_on_blocks(norm_type: float) -> None:
    whole = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-12, 4, 1000)
    (found,) = {exact_norm(whole.split(size), norm_type, CPU, False) for size in (1, 7, 64, 1000)}
    assert found == pytest.approx(float(torch.linalg.vector_norm(whole.double(), norm_type)), rel=1e-12)
    assert len({exact_norm([whole.flip(0) * scale], norm_type, CPU, False) for scale in (1.0, 1.0 + 2.0**-20)}) == 2


def test_what_is_no_number_stays_so() -> None:
    assert math.isnan(exact_norm([torch.tensor([1.0, math.nan, math.inf])], 2.0, CPU, False))
    assert math.isinf(exact_norm([torch.tensor([1.0, -math.inf])], 2.0, CPU, False))
    assert exact_norm([torch.zeros(3), torch.zeros(0)], 2.0, CPU, False) == 0.0
    with pytest.raises(ConfigurationError, match="norm_type=3"):
        exact_norm([torch.ones(1)], 3.0, CPU, False)

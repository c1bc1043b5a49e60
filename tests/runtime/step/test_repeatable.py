"""Settings of torch hold inside of a step, and are gone behind it."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import UnsupportedOperatorError
from autopar.runtime.step.repeatable import repeatable


def test_settings_come_back_and_an_operator_without_a_kernel_is_named() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with repeatable(8):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(UnsupportedOperatorError, match="deterministic=True: put_"), repeatable(True):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.set_num_threads(threads)
    assert not torch.are_deterministic_algorithms_enabled()

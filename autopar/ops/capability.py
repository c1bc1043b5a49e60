"""The compute capability of a CUDA device: which of torch's kernels it has."""

from __future__ import annotations

import torch

FAKE_CAPABILITY = (9, 0)


def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor); where torch sees no device, tensors on one are fake, of a program that is looked at."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else FAKE_CAPABILITY

"""Local GPUs: what torch sees of them. The one module about hardware that loads torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGPUs:
    """`count` equal GPUs of this machine; name: as the driver says it; memory_bytes: of one."""

    name: str
    memory_bytes: int
    count: int


def local_gpus() -> LocalGPUs | None:
    """The GPUs of this machine; None where there is none."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties()
    return LocalGPUs(name=gpu.name, memory_bytes=gpu.total_memory, count=torch.cuda.device_count())

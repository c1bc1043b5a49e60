"""Precision names: what `precision=` and `--precision` may say. What they do to a graph: `capture/precision.py`."""

from __future__ import annotations

from autopar.errors import ConfigurationError
from autopar.hardware.devices import Device, has_units
from autopar.nearest_name import did_you_mean

PRECISION_NAMES = ("fp32", "bf16", "fp16", "fp8")
REDUCE_NAMES = ("fp32", "bf16")
"""What `reduce_dtype=` may say."""
NAMES_ELSEWHERE = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16",
                   "float8": "fp8", "float8_e4m3fn": "fp8"}  # fmt: skip
"""torch's names, beside which ours are meant."""


def check_precision(precision: str | None) -> None:
    """Raise ConfigurationError for an unknown name, with the one that is meant."""
    if precision is None or precision in PRECISION_NAMES:
        return
    near = _meant(precision, PRECISION_NAMES)
    raise ConfigurationError(
        f'precision={precision!r} is unknown: write "bf16" (products in bf16, fp32 parameters, reductions and '
        'loss), "fp8" (the same with products in float8 where that is faster), "fp16" (the same in fp16, for a '
        f'GradScaler) or "fp32" (the dtypes of the model){near}'
    )


def check_reduce_dtype(reduce_dtype: str | None) -> None:
    """Raise ConfigurationError for an unknown name, with the one that is meant."""
    if reduce_dtype is None or reduce_dtype in REDUCE_NAMES:
        return
    raise ConfigurationError(
        f'reduce_dtype={reduce_dtype!r} is unknown: write "fp32" (gradients are added over ranks in fp32, also those '
        f'of bf16 parameters, at twice their bytes) or "bf16" (half the bytes){_meant(reduce_dtype, REDUCE_NAMES)}'
    )


def _meant(given: str, names: tuple[str, ...]) -> str:
    return did_you_mean(NAMES_ELSEWHERE.get(str(given).removeprefix("torch."), given), names)


def check_units(precision: str | None, device: Device) -> None:
    """Raise ConfigurationError for fp8 on a GPU that has no units for it."""
    if precision == "fp8" and not has_units(device, "float8_e4m3fn"):
        raise ConfigurationError(
            f'precision="fp8": {device.name} has no float8 units (NVIDIA GPUs have them from Ada and Hopper on); write '
            '"bf16"'
        )

"""A measured profile of the user's own device: seconds of single kernels, which override fitted curves near them.

    profile = OperatorProfile(name="lab-h100", device="NVIDIA H100 80GB HBM3", versions={"torch": "2.13"},
                              date="2026-11-21T12:00:00Z", kernels=(
        MeasuredKernel(kind="gemm", dtype="bfloat16", sizes=(4096, 4096, 11008, 1), seconds=6.1e-4),))
    save_profile(profile, path);  dataclasses.replace(device, profile=load_profile(path))

`cost_models/operators_measured.py` interpolates: exact where something was measured, the fitted curve times the ratio
of the neighbours between, and the curve's shape beyond. A kind or a dtype without a measurement keeps its curve.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from autopar.errors import ConfigurationError
from autopar.files import as_record, cache_directory, file_content, write_atomically
from autopar.hardware.hosts import Host

KernelKind = Literal["gemm", "grouped gemm", "attention forward", "attention backward",
                     "elementwise", "norm", "softmax", "gated", "rotary", "lookup"]  # fmt: skip

SIZES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k", "batch"),
    "grouped gemm": ("m", "n", "k", "batch"),
    "attention forward": ("batch", "heads", "queries", "keys", "qk_dim", "v_dim"),
    "attention backward": ("batch", "heads", "queries", "keys", "qk_dim", "v_dim"),
    "memory": ("nbytes", "row"),
}
"""What `MeasuredKernel.sizes` holds, by kind; "memory" stands for every family of kernels that memory bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKernel:
    """Seconds of one kernel, launch included, queue full (no gaps between kernels)."""

    kind: KernelKind
    dtype: str
    sizes: tuple[float, ...]
    """As `SIZES` names them. bytes: reads plus writes."""
    seconds: float
    layout: Literal["", "TN", "NN", "NT"] = ""
    """Of a product: forward, input gradient, weight gradient."""
    causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """What was measured on one device, with which software, when (UTC, ISO 8601)."""

    name: str
    device: str
    versions: Mapping[str, str]
    date: str
    kernels: tuple[MeasuredKernel, ...]
    host: Host | None = None
    """Of the machine of the device. None in profiles of before this was measured."""


def operator_profile_path(device: str) -> Path:
    """Where `autopar profile` leaves what it measured on GPUs of this name, for `Cluster.detect`."""
    return cache_directory() / "kernels" / ("-".join(re.findall(r"[a-z0-9]+", device.lower())) + ".json")


def load_profile(path: str | os.PathLike[str]) -> OperatorProfile:
    """Read a profile. Raises ConfigurationError where the file is none, or a kernel has sizes of another kind."""
    try:
        profile = as_record(file_content(path, "the file"), OperatorProfile, "the file")
    except ConfigurationError as error:
        raise ConfigurationError(f"cannot read an operator profile from {os.fspath(path)!r}: {error}") from error
    for kernel in profile.kernels:
        names = SIZES.get(kernel.kind, SIZES["memory"])
        if len(kernel.sizes) != len(names) or kernel.seconds <= 0:
            raise ConfigurationError(
                f"{os.fspath(path)}: a {kernel.kind} kernel needs sizes {names} and positive seconds, "
                f"not {kernel.sizes} and {kernel.seconds}"
            )
    return profile


def save_profile(profile: OperatorProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON, atomically."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(profile, order="deterministic"), indent=1))

"""Models of other packages, as they ship them: tiny, with random weights, one file for each package or few.

`PACKAGES` in a file: import names without which its entries are left out. `requirements.txt`: what brings them all.

torchvision's wheels are CUDA builds, whose C++ operators do not load beside a CPU build of torch; its import then asks
for two of them by name. They are named here, without an implementation: no model here calls them. torchaudio's
extension does not load either; torchaudio imports without it where it finds none.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

_LIBRARIES: list[Any] = []


def _import_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
        importlib.import_module("torchvision")


class _NoExtension(ModuleType):
    """Stands for `torchaudio._extension` where its libraries do not load."""

    _IS_TORCHAUDIO_EXT_AVAILABLE = False

    @staticmethod
    def fail_if_no_align(function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def _import_torchaudio() -> None:
    try:
        importlib.import_module("torchaudio")
    except OSError:
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchaudio"]:
            del sys.modules[name]
        sys.modules["torchaudio._extension"] = _NoExtension("torchaudio._extension")
        importlib.import_module("torchaudio")


if find_spec("torchvision") is not None:
    _import_torchvision()
if find_spec("torchaudio") is not None:
    _import_torchaudio()

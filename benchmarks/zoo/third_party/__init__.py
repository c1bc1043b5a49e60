"""Models of other packages, as they ship them: tiny, with random weights, one file for each package or few.

`PACKAGES` in a file: import names without which its entries are left out. `requirements.txt`: what brings them all.

torchvision's wheels are CUDA builds, whose C++ operators do not load beside a CPU build of torch; its import then asks
for two of them by name. They are named here, without an implementation: no model here calls them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

from torch.library import Library

_LIBRARIES: list[Library] = []


def _import_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
        importlib.import_module("torchvision")


if find_spec("torchvision") is not None:
    _import_torchvision()

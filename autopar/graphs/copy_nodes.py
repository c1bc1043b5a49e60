"""Copies to the host and back in a lowered graph: which nodes start them, which wait for them, what lies on the host.

    p = copy_to_host(x)         start      p lies on the host
    q = wait_copy(p, x)         wait       so does q; x lives on the device up to here
    y = copy_from_host(q, d)    start      y lies on the device from here on
    z = wait_copy(y, q)         wait
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx

from autopar.ops import host_copies  # noqa: F401 (registers the operators)

_autopar = torch.ops.autopar
COPY_TO_HOST = _autopar.copy_to_host.default
COPY_FROM_HOST = _autopar.copy_from_host.default
WAIT_COPY = _autopar.wait_copy.default
HOST_COPIES = frozenset({COPY_TO_HOST, COPY_FROM_HOST, WAIT_COPY})
"""All of them: no compiler looks at them."""

Direction = Literal["to_host", "from_host"]
_DIRECTIONS: dict[object, Direction] = {COPY_TO_HOST: "to_host", COPY_FROM_HOST: "from_host"}


def copy_direction(node: fx.Node) -> Direction | None:
    """Where to the copy goes that a node starts; None for any other node."""
    return _DIRECTIONS.get(node.target)

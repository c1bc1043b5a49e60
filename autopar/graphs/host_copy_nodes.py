"""Copies between device and host in a lowered graph: what starts them, what waits for them (`ops/host_copies.py`)."""

from __future__ import annotations

import torch

from autopar.ops import host_copies  # noqa: F401 (registers them)

TO_HOST = torch.ops.autopar.copy_to_host.default
FROM_HOST = torch.ops.autopar.copy_from_host.default
WAIT_COPY = torch.ops.autopar.wait_copy.default
HOST_COPIES = frozenset({TO_HOST, FROM_HOST, WAIT_COPY})
"""All of them: they compute nothing, and no compiler looks at them."""

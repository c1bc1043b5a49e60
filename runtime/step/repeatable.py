"""Repeatable: the settings of torch under which a step of a deterministic plan runs.

    with repeatable(plan.deterministic):      kernels that add in one order; of logical shards one thread, too
        ...

How many threads share a sum decides over its order, so runs on other numbers of processes, which have other shares of a
machine's cores, compute with one thread each. What was set before comes back behind the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from autopar.errors import UnsupportedOperatorError
from autopar.plans.logical_shards import Deterministic, num_shards

_NO_KERNEL = "does not have a deterministic implementation"


@contextmanager
def repeatable(deterministic: Deterministic) -> Iterator[None]:
    """Raises UnsupportedOperatorError inside for an operator of which torch has no kernel that repeats."""
    if not deterministic:
        yield
        return
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    one_thread = num_shards(deterministic) > 0 and threads > 1
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # every value is written before it is read
    if one_thread:
        torch.set_num_threads(1)
    try:
        yield
    except RuntimeError as error:
        if _NO_KERNEL not in str(error):
            raise
        raise UnsupportedOperatorError(
            f"deterministic={deterministic}: {str(error).partition(',')[0]}; use another operator there, or leave "
            "deterministic out"
        ) from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        memory.fill_uninitialized_memory = fills
        if one_thread:
            torch.set_num_threads(threads)

"""Runs all that is compared in Triton's interpreter in one process, and prints what became of each as JSON.

    TRITON_INTERPRET=1 python -m tests.runtime.interpreted

    {"interpreted_dropout": 48, "interpreted_dropout 1": "AssertionError: ...", ...}    how many agree, or what does not
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from tests.runtime import interpreted_dropout, interpreted_kernels

RUNS: dict[str, Callable[[], int]] = {
    "interpreted_dropout": partial(interpreted_dropout.compare, shift=0),
    "interpreted_dropout 1": partial(interpreted_dropout.compare, shift=1),
    "interpreted_kernels": partial(interpreted_kernels.compare, changed=""),
    "interpreted_kernels rms_norm_backward": partial(interpreted_kernels.compare, changed="rms_norm_backward"),
    "interpreted_kernels linear_cross_entropy": partial(interpreted_kernels.compare, changed="linear_cross_entropy"),
    "interpreted_kernels rope": partial(interpreted_kernels.compare, changed="rope"),
    "interpreted_kernels merge_blocks": partial(interpreted_kernels.compare, changed="merge_blocks"),
    "interpreted_kernels grouped_outer": partial(interpreted_kernels.compare, changed="grouped_outer"),
    "interpreted_kernels pack": partial(interpreted_kernels.compare, changed="pack"),
    "interpreted_kernels round_groups": partial(interpreted_kernels.compare, changed="round_groups"),
    "interpreted_kernels quantised_rows": partial(interpreted_kernels.compare, changed="quantised_rows"),
    "interpreted_kernels indexed_attention": partial(interpreted_kernels.compare, changed="indexed_attention"),
}


def outcome(compare: Callable[[], int]) -> int | str:
    """How many cases agree, or the error of one that does not."""
    try:
        return compare()
    except Exception as error:  # a kernel with a fault may fail in any way
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps({name: outcome(compare) for name, compare in RUNS.items()}))

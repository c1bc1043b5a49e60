"""Plan quality, measured: our plan and everybody else's train the same model on an emulated cluster, and the clock says
who wins.

    python -m benchmarks.plan_quality --setting gpt-200mbit        # DDP, FSDP2, TP, pipelines, products, and ours

Ranks are forks of one process, which must have no other threads then: numpy and torch start theirs as they are
imported, so their number is set here, before.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

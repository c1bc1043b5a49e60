"""The pools of worker processes of the distributed tests: those of `benchmarks.workers`.

    pool                  the fixture: one of four for the whole session
    forked(2)             for a test that kills its workers, or needs more of them

All are forked from the same two templates, which have imported what the jobs need and captured what several ranks run.
"""

from benchmarks.workers import Pool, WorkerError

__all__ = ["Pool", "WorkerError", "forked"]

IMPORTED = (
    "autopar.planner.planning",
    "benchmarks.zoo.row_job",
    "networkx",
    "tests.distributed.checkpoint_jobs",
    "tests.distributed.parity_jobs",
    "tests.distributed.pipeline_jobs",
    "tests.distributed.zoo_entries",
    "torch._functorch.aot_autograd",
    "torch._inductor.output_code",
)
"""By the process that all forked pools of a session share, those of the zoo's runner too: what is asked for first."""


def forked(size: int) -> Pool:
    """A pool of the test's own; it closes it."""
    return Pool(size, preload=IMPORTED)

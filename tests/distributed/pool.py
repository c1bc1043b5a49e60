"""The pool of worker processes that the distributed tests share: that of `benchmarks.workers`, one per session."""

from benchmarks.workers import Pool, WorkerError

__all__ = ["Pool", "WorkerError"]

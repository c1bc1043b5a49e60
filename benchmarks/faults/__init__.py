"""Faults: what goes wrong around a training job, made on purpose, from outside and as a user would meet it.

    python -m benchmarks.faults --only batches          # every fault of benchmarks/faults/batches.py, a row each
    python -m benchmarks.faults --cost                  # what the guards cost

A row says what was done, what became of every process, how long that took, and whether the run was right or said why
not. Nothing here looks inside of autopar: a fault stays the same however it is guarded against.
"""

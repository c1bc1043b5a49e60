"""Frameworks: training loops of other packages on two processes, beside the same loop without autopar on one.

    python -m benchmarks.frameworks                       # every row, as a table
    python -m benchmarks.frameworks --only trainer/       # rows by name

A row is a feature of a framework. Losses, weights and metrics of both runs are compared; or the feature is refused, and
the row says with which line. How a framework is changed for autopar stands in `CHANGES`.
"""

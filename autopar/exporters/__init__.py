"""Plans as configurations of other tools: the nearest uniform configuration, and what it gives up.

In: a plan. Out: one degree per kind of parallelism with what gets lost (`uniform`), and that as a file or flags of
another tool (`configurations`) or as torch code (`torch_code`).
"""

"""Tidy: what every captured graph goes through before rules see it.

In: a joint graph as it was traced. Out: the same computation with one spelling per operation, a phase and a stable name
on every operator. `tidy_passes` lists the passes in their order.
"""

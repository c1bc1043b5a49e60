"""Pipeline schedules as data: who computes which pass of which micro-batch, in which order.

In: stages, micro-batches and the times of passes. Out: a `Schedule` (`actions`), per rank a list such as `0F0 0F1 0B0`:
from a family (`list_scheduler`, whose orders are in `orders`, `waves` and `building_blocks`) or from a search
(`free_search`). Whatever passes `check` can be played, priced and run.
"""

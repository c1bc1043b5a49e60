"""Passes: FX graph -> FX graph, nothing else.

In: a captured program, or one with its plan and rank. `tidy` runs before planning; behind it `lowering` makes the
program of one rank with explicit collectives, with `implementations` and `kernels` for its operators; `stages` cuts a
pipeline's program; `overlap` starts collectives early. Out: graphs that the runtime runs and the cost models price.
"""

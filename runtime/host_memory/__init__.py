"""Memory of the host: what malloc keeps between steps, and what a GPU copies to and from.

In: `copy_to_host`, `copy_from_host` and `wait_copy` of a graph (`autopar/ops/host_copies.py`). `stream_copies` is the
engine behind them on CUDA, `pinned_pool` the memory that it copies to, under a budget; `host_allocator` tells glibc to
keep what a step frees.
"""

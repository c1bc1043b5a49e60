"""Step: the graphs of one rank as a function with gradients.

In: forward and backward graphs, and the arguments of a call. `emit` binds the graphs to kernels and groups; `batches`
and `batch_parts` cut the arguments; `accumulation`, `micro_batch_runs` and `differentiable_parts` add up gradients.
Out: an `emitted_step` that the module calls.
"""

"""Step: the graphs of one rank as a function with gradients.

In: forward and backward graphs, and the arguments of a call. `bound_graphs` binds the graphs to groups; `call_values`
binds a call, `batches` and `batch_parts` cut its arguments; `accumulation` adds up gradients, `whole_step` runs the
whole batch. Out: an `emitted_step` that the module calls.
"""

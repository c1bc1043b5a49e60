"""Lowering: a captured program and a plan -> what the ranks run, by one ordered tuple of passes.

In: a `Program` of global shapes (in its micro-batches), a `Plan` and a rank.
Out: a `LoweredStep`: the stages of that rank (a plan without stages has one), each a forward and a backward graph.
Runtime, planner, simulation, verification and explanations read the same step; nobody else calls one of the passes.
"""

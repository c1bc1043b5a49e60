"""The only room that talks to devices: processes, detection, calibration, steps.

In: a plan and lowered graphs; never the planner. `parallel_module` is the compiled model (`shard_model` makes it of the
user's); `step` and `pipeline` run its graphs, `collectives` and `kernels` what stands in them; `parameters`, `weights`
and `checkpoints` hold the weights, `host_memory` what is copied to the host; `guards` and `module_calls` see that ranks
do one thing. Out: a module that trains, and measured profiles (`calibration`).
"""

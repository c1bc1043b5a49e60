"""Every second and every byte that the planner believes.

In: values of `autopar.hardware`, local sizes, lowered graphs. Out: seconds of kernels (`operator_costs`) and
collectives (`collective_costs`), of lowered programs (`program_costs`), bytes (`device_memory`, `program_memory`), and
steps played over time (`simulator`, `schedule_player`). Nothing here chooses.
"""

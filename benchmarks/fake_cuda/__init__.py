"""Emitted rank programs run on fake CUDA tensors: what a GPU would be asked for, on a machine without one.

    record = run_rank(program, plan, rank=3)      # every operator with its node, every storage with its life
    faults(record, plan)                          # [] where the step holds what the plan says, and nothing waits

`tensors.py` makes the tensors, `record.py` watches, `rank_step.py` runs, `checks.py` compares with the plan.
"""

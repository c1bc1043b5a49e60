"""The demo: plan a large GPT for a cluster that is not here, then train a small one on local processes.

In: nothing but this machine. Out: a page of tables (`journey`), from a plan for 16 GPUs (`large_plan`) and the losses
and seconds of one process and of several (`training`).
"""

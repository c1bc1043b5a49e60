"""Plan quality, measured: our plan and everybody else's train the same model on an emulated cluster, and the clock says
who wins.

    python -m benchmarks.plan_quality --setting gpt-200mbit        # DDP, FSDP2, TP, pipelines, products, and ours
"""

"""An emulated cluster on one Linux machine: network namespaces as nodes, shaped links between them, a share of a core
per rank.

    python -m benchmarks.netlab --preset flat-200mbit -- python train.py      # a rank in every node, real gloo

Processes, sockets and TCP are real; only the wire is emulated (`switch.c`). Needs root on Linux, `ip` and a C compiler.
"""

"""The first day on a GPU as one program that can be taken up again: `python -m benchmarks.gpu`.

    python -m benchmarks.gpu --prepare carried                   # where OR-tools is: plans, commit
    python -m benchmarks.gpu --carry carried --output found      # on the GPU: one JSON file a stage
    python -m benchmarks.gpu --carry carried --output more --resume found      # what found lacks
    python -m benchmarks.gpu --rehearse --output tried           # every stage on a CPU, at tiny sizes

`table.py` lists the stages, most valuable first; `goals.py` what their figures are held against. Reading order: a
`Stage` (stage.py) yields rows, `child.py` runs it in a process of its own, `runner.py` writes its file.
"""

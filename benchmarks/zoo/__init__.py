"""The zoo: tiny configurations of many architectures, captured, planned and compared with the plain model.

    python -m benchmarks.zoo --json --output benchmarks/results/zoo.json

`registry` says which architectures there are, `plain_*` and `transformers_*` hold them, `runner` keeps the processes
that execute a row, `row_job` is what they do.
"""

"""Golden files: small models under fixed plans, as text: what was planned, and what some ranks run.

    python -m tests.golden --update      writes `files/` anew; without `--update` it says what differs

`cases.py` says which models, clusters and questions; `texts.py` how a plan and a program are written;
`test_golden.py` compares. A change of planner or lowering shows as a diff of these files, to be read and committed.
"""

"""Explain: what a plan is asked beside its layouts: why so, what else, what if, what does a rank run.

In: a plan and its `source` (the captured program and the question that it answers), or a plan file, from which the
source is made again. Out: answers as values that print themselves: choices with their runners-up (`choices`), two plans
side by side (`comparison`), what a rank holds (`memory`), a plan with some choices fixed (`edits`), what a rank runs as
Python (`code`). Prices are the planner's, steps are played by the simulator.
"""

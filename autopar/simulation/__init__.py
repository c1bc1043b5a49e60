"""Simulation: the step that a plan describes, played without devices.

In: a program and a plan. Out: every kernel, collective and transfer of every rank with its bytes (`step_program`), and
the timeline of the step with its peaks (`played_plan`). Prices and the discrete-event player come from `cost_models`;
the graphs are those that the runtime runs.
"""

"""Pipeline: the actions of one rank, one after the other, between wires.

In: the stages of this rank and a schedule. `emit_pipeline` binds them; `pipeline_routes` and `pipeline_wires` say who
sends what in which order; `pipeline_run` plays a step. Out: loss, outputs and gradients, shared between rank groups
(`shared_values`).
"""

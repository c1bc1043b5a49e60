"""Pipeline: a step in parts on one rank, its actions one after the other, between wires.

In: the stages of this rank and a schedule. `emit_parts` binds them to a `parts_step`; `pipeline_routes` and
`pipeline_wires` say who sends what in which order; `pipeline_run` plays a step. Out: loss, outputs and gradients,
shared between rank groups (`shared_values`).
"""

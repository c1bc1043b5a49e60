"""Pipelines: which blocks form the stages, on which sub-meshes, under which schedule.

In: a query with stages asked for (`PipelineRequest`) or left open (`free_pipelines`). Sub-meshes are solved once
(`solved_submeshes`) and read as costs of blocks (`block_costs`); `stage_search` cuts them, `choose_pipeline` plays the
schedules. Out: a plan with stages (`write_pipeline`, `write_groups`).
"""

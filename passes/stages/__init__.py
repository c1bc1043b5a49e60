"""Stages: one program per stage of a pipeline.

In: the program of one micro-batch and a plan with stages. `place_stages` gives every operator its stage, `cut_stages`
cuts there, `stage_plans` says each stage's layouts. Out: programs that the lowering takes as any other; their backward
in halves (`weight_gradients`), and what runs once per step (`once_per_step`, `late_sums`).
"""

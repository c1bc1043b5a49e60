"""Weights: what one process held -> what this rank keeps and trains.

In: a module tree and the plan's layouts. `initialise` draws weights that are on meta, `initial_weights` makes those of
all ranks one, `shard_model` cuts them, and `replaced_parameters` notices an optimizer that still holds the old ones.
`whole_weights` puts them together again, and `planned_model` answers as the plain model does. `clip_grad` scales the
gradients of all ranks alike, and `stage_gradients` refuses who sees a stage's only.
"""

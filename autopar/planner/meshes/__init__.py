"""Meshes: which mesh, which micro-batches, which of several optima.

In: a query without a mesh. `mesh_shapes` lists what is left to try, `mesh_search` goes through it best first,
`solved_meshes` knows what was solved; `baseline_plans` are DDP, ZeRO-3 and others on the same prices. Out:
`choose_mesh`, `choose_micro_batches` and, by the played step, `choose_step`.
"""

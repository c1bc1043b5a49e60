"""The planner: captured program -> Problem -> Solution -> Plan. Needs no device and no process group.

`planning` is the entry. From the bottom up: `solver` (arrays only) and `routes` (steps between layouts); `problem`
(what may be chosen, and its seconds); `memory` (bytes and recomputation) and `batch` (micro-batches); `one_mesh` (the
best plan on one mesh); `meshes` (which mesh, how many parts); `pipelines` (stages); `search` (what competes). A package
imports only packages that stand before it in this list.
"""

"""Capture by blocks: of a run of equal modules four are traced, and the graph is extended to all of them.

    32 equal decoder layers    -->    layers 0, 1, 2 and 31 are traced; layer 2 is repeated for 3 .. 30

The graph is that of the whole trace, node by node. Where that is not known for certain, the whole model is traced: see
`equal_members` (what is equal), `outlines` (what the code around the members does), `sheets` (the extension),
`joint_graphs` (graphs as sheets) and `short_traces` (all of it in order).
"""

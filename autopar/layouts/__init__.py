"""Layouts: how a tensor lies on a mesh, and which collectives turn one layout into another.

In: shapes, placements per mesh axis, mesh shapes. Out: local blocks (`placement`), the moves of single axes and their
order (`moves`), and from layout to layout an ordered list of typed steps (`redistribution`). The planner prices these
steps, the lowering emits them; neither knows steps of its own. Needs neither torch nor a cluster.
"""

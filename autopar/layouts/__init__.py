"""Layouts: how a tensor lies on a mesh, and which collectives turn one layout into another.

In: shapes, one placement per mesh axis, mesh shapes. Out: local blocks (`placement`), layouts behind reshapes
(`views`), what single axes do and in which order (`moves`), and from layout to layout an ordered list of typed steps
(`redistribution`). The planner prices these steps and the lowering emits them; neither knows steps of its own.
"""

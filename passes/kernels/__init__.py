"""Kernels: groups of operators that run as one.

In: a lowered program. Patterns are text (`graph_patterns`, `kernel_patterns`), found forward and backward together
(`found_groups`). Out: the program with our operators in their place (`use_kernels`), expert products in sorted rows
(`sort_by_expert`), and pieces that a compiler may take whole (`compilable_pieces`).
"""

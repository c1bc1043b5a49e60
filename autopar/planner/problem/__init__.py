"""The problem of one mesh: what may be chosen, and what every choice costs in seconds.

In: a program, constraints, a mesh, a cluster. Once per program: `factorisation`, `equivalence`, `skeleton`. Once per
mesh: `strategies`, `label_sets`, `redistribution_tables`, `prices`. Out: `build` puts them together to the solver's
Problem, with the meaning of every variable.
"""

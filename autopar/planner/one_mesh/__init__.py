"""One mesh: the best plan on it, and questions about that plan.

In: a `query`, all that a plan answers besides the mesh, and a mesh. `mesh_plan` prices, solves (`within_memory` where
the limit binds), lowers for one rank and predicts (`predict`); `read_solution` writes the Plan. Out: a Candidate. A
plan becomes an assignment again in `recovered_problem` and is solved again with something changed in `solved_again`.
"""

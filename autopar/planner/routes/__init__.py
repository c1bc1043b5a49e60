"""Routes: the cheapest steps between any two layouts of a tensor.

In: pairs of layouts as numbers (`pair_codes`) and the sizes that matter (`growing`, `fits`). Out: `priced_routes`
says for whole tables of pairs which steps lead from one to the other, and prices them by arrays. The steps are those of
`autopar.layouts`, which the lowering emits.
"""

"""The search: what competes with what, and what is said where nothing fits.

In: a query and what it leaves open. `best_plan` compares meshes, baselines and pipelines (`baselines_first`: these only
where one may be faster). Out: the chosen Plan with its alternatives, or an error whose `suggestions` are planned, too.
"""

"""Passes: FX graph -> FX graph, nothing else."""

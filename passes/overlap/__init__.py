"""Overlap: communication beside computation.

In: a lowered program whose collectives wait at once. Out: the same with fewer and larger collectives
(`bucket_collectives`), products in chunks (`chunk_products`) and early starts with late waits (`early_starts`);
`overlapped` runs them as the plan says.
"""

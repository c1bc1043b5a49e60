"""Batch: whether a step may run in parts of its batch.

In: a program, and its capture at the size of a part. Out: how every value depends on the samples (`batch_flow`), and
the program of one part with the statistics that the parts share (`micro_batch_program`), or the operator that forbids
it."""

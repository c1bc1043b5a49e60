"""Mutants: small faults are planted in every room, one at a time, and the tests that reach them must fail."""

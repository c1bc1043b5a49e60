"""Context parallelism of whole models: every way of attention over an axis cp against the program on one rank."""

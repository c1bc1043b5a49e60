"""Explain: what a plan is asked beside its layouts: why so, what else, what if, what does a rank run."""

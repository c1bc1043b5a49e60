"""Fuzzing: random graphs of the rule table's operators under random valid plans, against the plain graph."""

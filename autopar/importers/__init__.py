"""Configurations of other tools as plans: the inverse of `autopar.exporters`."""

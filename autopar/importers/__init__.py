"""Configurations of other tools as plans: the inverse of `autopar.exporters`.

In: a file or flags of another tool (`settings` knows what nobody has read of them). Out: a uniform configuration and
the options with which `autopar.plan` prices it (`configurations`); what has no counterpart is refused by name.
"""

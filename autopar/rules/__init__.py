"""Sharding rules: which dims of which operator may be split, as data.

In: one call of an operator (`call`: shapes, dtypes and attributes). Out: its `Rule` (`rule`): a name for every dim that
may be split, what a split leaves, what it needs, how it is priced. Tables hold one string per operator (`language` is
its reference), or a function that returns one; `binding` reads a string for a call, `engine` finds it, `proof` executes
the operator on blocks, which strings of users (`registration`) and proposed ones (`discovery`) must pass.
"""

"""What stands in a lowered graph, for those who price it and those who rewrite it.

In: a graph of one rank (an FX graph at ATen level, with local shapes in the meta of its nodes). Out: which nodes run as
one kernel, what an operator is, which nodes start and await collectives, which bytes live from where to where. Nothing
here knows seconds, and nothing rewrites a graph; cost models and passes both read it and never each other.
"""

"""Memory: when every byte of a step lives, and what can be recomputed instead of kept.

In: a built problem. Out: how many bytes live when under every choice (`lifetimes`, `live_bytes`), rows of bytes for the
solver (`memory_rows`), the labels of recomputation (`recomputation`), what a lowered program really holds
(`lowered_bytes`), and what is short where nothing fits (`shortage`).
"""

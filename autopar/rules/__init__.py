"""Sharding rules: which dims of which operator may be split, as data."""

"""Measures of the source itself: rooms, levels, sizes, types and words, of this tree and of an older commit."""

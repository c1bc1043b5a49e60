"""Recomputation beside Checkmate's exact program, the square-root rule and DTR: seconds that run again in what fits."""

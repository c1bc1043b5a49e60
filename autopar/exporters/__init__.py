"""Plans as configurations of other tools: the nearest uniform configuration, and what it gives up."""

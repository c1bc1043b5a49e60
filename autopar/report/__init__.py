"""Plans and their numbers as tables of a terminal."""

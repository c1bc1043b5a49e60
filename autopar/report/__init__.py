"""Plans and their numbers for people: tables of a terminal, a page, a trace with the measured step beside it.

In: plans, and what was played or measured of them. Out: text (`tables`, `differences`, `coverage`), one HTML file
(`html`), one file for Perfetto (`measured`).
"""

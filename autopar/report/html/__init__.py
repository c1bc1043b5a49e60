"""A plan as one HTML page, without anything loaded from elsewhere.

In: a plan, and a played step where there is one. Out: one file (`page`), made of `templates/` and of what `bars`,
`timeline` and the others here draw.
"""

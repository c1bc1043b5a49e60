"""A plan as one HTML page: see `page.py`."""

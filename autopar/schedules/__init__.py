"""Pipeline schedules as data: `actions` (a schedule and its text), `check`, `list_scheduler` (the families)."""

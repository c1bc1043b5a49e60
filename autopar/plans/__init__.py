"""Plans: the value that everything else meets at.

In: nothing but layouts and a program's names. Out: the Plan (`parallel_plan`), its file (`plan_json`, older schemas in
`plan_versions`, checks of entries in `plan_entries`), its words (`plan_text`, `plan_folding`), and which link each axis
of its mesh crosses (`mesh_links`). `explain.answers` answers what it is asked. Knows neither planner nor runtime.
"""

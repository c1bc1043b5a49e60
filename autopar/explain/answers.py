"""Answers: the table of contents of `autopar.explain`. `Source` loads it at the first question about a plan."""

from autopar.explain.choices import explain_choices
from autopar.explain.code import rank_program
from autopar.explain.comparison import compare_plans
from autopar.explain.edits import edited
from autopar.explain.memory import memory_table

__all__ = ["compare_plans", "edited", "explain_choices", "memory_table", "rank_program"]

"""The planner's exact solver: `Problem` in, `Solution` with a checkable lower bound out.

In: one label per node, costs per node and edge, rows of bytes (`labelling`): arrays, neither torch nor plans. Out: an
assignment, a proven bound and a certificate that `certificate` replays. Start reading at `solving.py`; without rows the
way leads through `exact.py`, with them through `budgets.py`.
"""

from autopar.planner.solver.certificate import CertificateError, certified, check_certificate
from autopar.planner.solver.labelling import FORBIDDEN, Edge, MemoryRow, Problem, Tie, evaluate, is_forbidden
from autopar.planner.solver.solution import Certificate, Solution, Status, solution_of
from autopar.planner.solver.solving import solve

__all__ = [
    "FORBIDDEN",
    "Certificate",
    "CertificateError",
    "Edge",
    "MemoryRow",
    "Problem",
    "Solution",
    "Status",
    "Tie",
    "certified",
    "check_certificate",
    "evaluate",
    "is_forbidden",
    "solution_of",
    "solve",
]

"""The planner's exact solver: `Problem` in, `Solution` with a checkable lower bound out.

Start reading at `solve.py`.
"""

from autopar.planner.solver.certificate import CertificateError, certified, check_certificate
from autopar.planner.solver.problem import FORBIDDEN, Edge, MemoryRow, Problem, Tie, evaluate, is_forbidden
from autopar.planner.solver.solution import Certificate, Solution, Status
from autopar.planner.solver.solve import solve

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
    "solve",
]

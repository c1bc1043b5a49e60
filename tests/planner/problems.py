"""Problems built from captured models, for the tests of the planner."""

import torch

from autopar.capture import capture
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.query import Query, kernel_backend
from autopar.planner.one_mesh.restrict import restricted
from autopar.planner.problem.build import Built, build_problem
from autopar.planner.problem.constraint_targets import bind_constraints
from autopar.planner.problem.factorisation import Factorisation
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.planner.problem.prices import Prices
from autopar.planner.problem.search_limits import SEARCH
from autopar.program import Program
from autopar.request.constraints import Constraints
from autopar.request.search_mode import Mode


class Mlp(torch.nn.Module):
    """forward(x (B, 64), y (B,)) -> cross entropy over 48 classes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, 48)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.down(torch.nn.functional.gelu(self.up(x)))
        return torch.nn.functional.cross_entropy(logits, y)


def captured_mlp(batch: int = 16, width: int = 64) -> Program:
    """The joint program of the MLP."""
    with torch.device("meta"):
        inputs = torch.empty(batch, width), torch.empty(batch, dtype=torch.long)
        return capture(Mlp(width), inputs, {})


def free_query(program: Program, cluster: Cluster, mode: Mode = "default") -> Query:
    """A question without constraints and without a memory limit, for the optimizer that is assumed."""
    return Query(
        program=program,
        cluster=cluster,
        state_bytes=state_bytes(program, None),
        constraints=Constraints(),
        budget_bytes=float("inf"),
        kernel_backend=kernel_backend(cluster),
        factorisation=Factorisation(program),
        search=SEARCH[mode],
    )


def build(program: Program, cluster: Cluster, mesh: Mesh, constraints: Constraints | None = None) -> Built:
    """The problem of a program on a mesh, for AdamW and eager kernels."""
    factorisation, constraints = Factorisation(program), constraints or Constraints()
    prices, state = Prices(cluster, mesh), state_bytes(program, "AdamW")
    whole = build_problem(program, mesh, prices, constraints, state, "eager", factorisation)
    return restricted(whole, mesh, bind_constraints(program, constraints, factorisation))

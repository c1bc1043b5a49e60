"""`autopar verify`: compile a model with `verify=True` on local processes, as torchrun would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.api import compile as compile_model
from autopar.capture.models import load_model
from autopar.cli.options import OPTIMIZERS, parse_constraints, parse_dims, parse_mesh
from autopar.parallel_plan import Plan
from autopar.runtime.local_processes import Report, run_processes


def verify_model(model: str, processes: int, plan: Plan | None, options: Mapping[str, Any]) -> None:
    """Raises VerificationError where `processes` local processes do not compute what the plain model computes."""
    run_processes(_verify, processes, model, None if plan is None else plan.to_json(), dict(options))


def _verify(report: Report, model: str, plan: bytes | None, options: dict[str, Any]) -> None:
    module, inputs = load_model(model, options["batch"], options["seq"], options["precision"])
    compiled = compile_model(
        module,
        inputs,
        plan=None if plan is None else Plan.from_json(plan),
        optimizer=OPTIMIZERS[options["optimizer"]],
        precision=options["precision"],
        mesh=parse_mesh(options["mesh"]),
        dims=parse_dims(options["dims"]),
        memory_limit=options["memory_limit"],
        constraints=parse_constraints(options["constraints"]),
        verify=True,
    )
    with torch.no_grad():
        compiled(**inputs)

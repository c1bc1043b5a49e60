"""Output rows: which dim of an output holds the samples of the batch.

    {"logits": (8, 16, 512), "attentions": (8, 4, 16, 16), "scale": (512,)}   -->   {"logits": 0, "attentions": 0}

Read off the rules: the first dim whose outermost part is the same thing as the batch dim of the inputs.
"""

from __future__ import annotations

from torch import fx

from autopar.planner.problem.factorisation import Factorisation, batch_class, shape_of, value_of
from autopar.program import Program


def output_rows(program: Program) -> dict[str, int]:
    """Output -> dim, of the outputs that have one."""
    factorisation = Factorisation(program)
    batch = batch_class(program, factorisation)
    rows: dict[str, int] = {}
    for node, output in zip(program.returned, program.outputs, strict=True):
        if output.role != "output" or not isinstance(node, fx.Node) or batch is None:
            continue
        value = value_of(node)
        for dim in range(len(shape_of(*value))):
            if factorisation.atoms(value, dim) and factorisation.atom_class(value, dim) == batch:
                rows[output.name] = dim
                break
    return rows

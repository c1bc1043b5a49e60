"""`associative_scan` while a model is traced: a linear recurrence becomes our operator, a sum torch's cumsum.

    associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (a, b), dim)    -->   linear_recurrence(a, b, dim)

torch compiles the call, or writes it out as slices of every second place, which no rank can take apart. What the
function combines is found by calling it on numbers. A function of another kind is written out.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autopar._compat import no_dispatch, tree_leaves
from autopar.ops.linear_recurrence import linear_recurrence

Combine = Callable[..., Any]


@contextlib.contextmanager
def plain_associative_scans() -> Iterator[None]:
    """While active, scans along dim 0 (torch moves the dim there) run as operators that have a rule."""
    module = importlib.import_module("torch._higher_order_ops.associative_scan")
    written_out = module.generic_associative_scan

    def scan(combine: Combine, leaves: Sequence[Tensor], dim: int = 0, additional_inputs: Sequence[Any] = ()) -> Any:
        found = None if additional_inputs else _known(combine, leaves, dim)
        return written_out(combine, leaves, dim, additional_inputs) if found is None else found

    def operator(combine: Combine, leaves: Sequence[Tensor], additional_inputs: Sequence[Any]) -> Any:
        return scan(combine, leaves, 0, additional_inputs)

    with (
        mock.patch.object(module, "generic_associative_scan", scan),
        mock.patch.object(module, "associative_scan_op", operator),
        mock.patch.object(module, "_maybe_compile_and_run_fn", lambda function, *args: function(*args)),
    ):
        yield


def _known(combine: Combine, leaves: Sequence[Tensor], dim: int) -> list[Tensor] | None:
    if len({leaf.shape for leaf in leaves}) > 1 or not all(leaf.is_floating_point() for leaf in leaves):
        return None
    if len(leaves) == 1 and _combines(combine, lambda left, right: [left + right], 1):
        return [leaves[0].cumsum(dim)]
    for decay in (0, 1) if len(leaves) == 2 else ():
        if _combines(combine, _recurrence(decay), 2):
            found = [leaves[decay].cumprod(dim), linear_recurrence(leaves[decay], leaves[1 - decay], dim, False)]
            return found if decay == 0 else found[::-1]
    return None


def _recurrence(decay: int) -> Callable[..., list[Tensor]]:
    """What joins two runs of a recurrence whose leaf `decay` are the factors."""

    def join(*values: Tensor) -> list[Tensor]:
        (a, b), (other_a, other_b) = ((pair[decay], pair[1 - decay]) for pair in (values[:2], values[2:]))
        joined = [a * other_a, other_a * b + other_b]
        return joined if decay == 0 else joined[::-1]

    return join


def _combines(combine: Combine, wanted: Callable[..., list[Tensor]], count: int) -> bool:
    """Whether a function gives what is wanted for numbers of many sizes drawn at random: polynomials that agree there
    are equal, and a limit among them shows."""
    with no_dispatch(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(2 * count, 64, generator=generator, dtype=torch.float64)
        values = list(drawn * torch.logspace(-9, 9, 64, dtype=torch.float64))
        try:
            found = tree_leaves(combine(*values))
        except Exception:  # whatever a function of the user raises for plain numbers
            return False
        expected = wanted(*values)
        return len(found) == len(expected) and all(
            isinstance(x, Tensor) and x.shape == y.shape and torch.allclose(x, y, rtol=1e-9, atol=0)
            for x, y in zip(found, expected, strict=True)
        )

"""Rows that a model sorted by expert and splits into one group per expert, sizes read from the data.

    sizes = counts.tolist()                                   # rows of each expert: depends on the data
    parts = rows.split(sizes, dim=0)
    out = torch.cat([linear(part, weight[e]) for e, part in enumerate(parts)])

`Sizes` stands for the list. The expert of a row follows from the counts alone, so a group is a choice like any other
(`expert_rows.py`), and the groups joined in order are the rows of all experts where they stand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autopar._compat import FakeTensor, FunctionalTensor
from autopar.capture.expert_rows import AllExperts, ExpertChoice, Position, Row, Unlike
from autopar.capture.routing import Number


class Sizes(list[Number]):
    """How many rows each expert has, as the list that `counts.tolist()` would be. counts: (num_experts,) integers."""

    def __init__(self, counts: Tensor) -> None:
        super().__init__(Number() for _ in range(counts.shape[0]))
        self.counts = counts

    def choice(self, num_rows: int) -> ExpertChoice:
        """The expert of each of `num_rows` rows, of which the first counts[0] are those of expert 0, and so on."""
        ends = self.counts.cumsum(0)
        rows = torch.arange(num_rows, device=self.counts.device)
        return ExpertChoice((rows.unsqueeze(1) >= ends).sum(1), known=True)


@contextlib.contextmanager
def lists_as_sizes(counts_rows: Callable[[Tensor], bool]) -> Iterator[None]:
    """Within the context, `tolist` of a tensor that counts the rows of experts gives `Sizes`.

    The tensors of a trace bring their own `tolist`, which no function mode sees.
    """
    with contextlib.ExitStack() as stack:
        for kind in (FunctionalTensor, FakeTensor):
            stack.enter_context(mock.patch.object(kind, "tolist", _tolist(kind.tolist, counts_rows)))
        yield


def _tolist(plain: Callable[[Any], Any], counts_rows: Callable[[Tensor], bool]) -> Callable[[Any], Any]:
    return lambda tensor: Sizes(tensor) if counts_rows(tensor) else plain(tensor)


def split_sizes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Sizes | None:
    """The sizes in a call of split along dim 0 by `Sizes`; None for other calls. Raises Unlike for another dim."""
    if not name.startswith("split"):
        return None
    named = [kwargs[key] for key in ("split_size_or_sections", "split_size", "split_sizes") if key in kwargs]
    sizes = args[1] if len(args) > 1 else next(iter(named), None)
    if not isinstance(sizes, Sizes):
        return None
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if dim != 0:
        raise Unlike(f"groups of rows along dim {dim}")
    return sizes


def joined(formulas: Sequence[Row]) -> Tensor:
    """The rows of all experts from one formula per group, in the order of the groups. Raises Unlike."""
    first = position_in(formulas[0])
    assert first is not None, "a group has rows of an expert"
    experts = AllExperts(first.choice, range(len(formulas)), first.axes)
    rows: Tensor = experts.value(formulas)
    return rows


def position_in(formula: Any) -> Position | None:
    """Whose rows a formula has."""
    if isinstance(formula, Position):
        return formula
    if isinstance(formula, Row):
        parts: Sequence[Any] = [*formula.args, *formula.kwargs.values()]
    else:
        parts = formula if isinstance(formula, tuple | list) else ()
    return next((found for part in parts if (found := position_in(part)) is not None), None)

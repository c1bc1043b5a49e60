"""A fake mode for a forward that is only watched: operators run their meta kernels, past torch's cache of fake results.

    with QuickValues() as mode: model(*twins)        three quarters of the time of `KnownValues`

The cache pays where a call comes again with the same sizes, and a size is asked for once. What has a value, makes one,
or has no meta kernel goes the usual way, so that Python is told the same of every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._compat import FakeTensor, OpOverload, fake_result, tree_leaves
from autopar.capture.known_values import KnownValues, makes_values

_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded})
"""Of operators whose results a meta kernel cannot know."""


class QuickValues(KnownValues):  # type: ignore[no-untyped-call]
    """See the module docstring."""

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """One operator; see FakeTensorMode."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if _is_plain(func) and kwargs.get("device") is None and self._are_unknown(leaves):
            try:
                return fake_result(self, func, args, kwargs, leaves)
            except NotImplementedError:  # no meta kernel
                pass
        return super().dispatch(func, types, args, kwargs)

    def _are_unknown(self, leaves: Sequence[Any]) -> bool:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ours = (isinstance(t, FakeTensor) and t.fake_mode is self and t.constant is None for t in tensors)
        return bool(tensors) and all(ours)


def _is_plain(func: Any) -> bool:
    return (
        isinstance(func, OpOverload)
        and func.namespace == "aten"
        and not makes_values(func)
        and not _TAGS & {*func.tags}
    )

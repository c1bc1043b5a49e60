"""Example inputs: what users pass, in one form, and which dim of each tensor is the batch.

    tensor            one positional argument
    tuple or list     positional arguments
    mapping           keyword arguments

Tensors may be real, fake or on the meta device: only their shapes and dtypes are read. The batch is dim 0 of every
tensor that agrees with the others there; `batch_dims` overrides by input name.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar._compat import TreeSpec, keystr, tree_flatten_with_path
from autopar.capture.structures import check_tensor, register_structures
from autopar.errors import CaptureError, ConfigurationError

log = logging.getLogger(__name__)


def normalize_example_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a tensor, a tuple or list, or a mapping."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    raise ConfigurationError(
        f"example inputs of type {type(example_inputs).__name__}: pass a tensor (one argument), a tuple "
        "(positional arguments) or a dict (keyword arguments)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatInputs:
    """The flattened (args, kwargs). names: of each leaf; tensor_leaves: indices of the leaves that are tensors."""

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    spec: TreeSpec
    tensor_leaves: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the leaves, in their order."""
        return tuple(self.leaves[index] for index in self.tensor_leaves)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of `tensors`."""
        return tuple(self.names[index] for index in self.tensor_leaves)


def flatten_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatInputs:
    """Flatten (args, kwargs). Leaves are named `args.0`, `input_ids`, `batch.labels`.

    Raises CaptureError for tensors that are empty, nested, sparse or quantised, and for objects that hide tensors.
    """
    register_structures((tuple(args), dict(kwargs)), "the arguments")
    paths, spec = tree_flatten_with_path((tuple(args), dict(kwargs)))
    leaves = tuple(leaf for _, leaf in paths)
    for path, leaf in paths:
        if isinstance(leaf, Tensor):
            check_tensor(f"input {leaf_name(path)}", leaf)
    return FlatInputs(
        leaves=leaves,
        names=tuple(leaf_name(path) for path, _ in paths),
        spec=spec,
        tensor_leaves=tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)),
    )


def leaf_name(path: Any) -> str:
    """The name of an argument leaf, from its path in (args, kwargs)."""
    is_positional = path[0].idx == 0
    parts = ["args"] if is_positional else []
    return ".".join([*parts, *(path_part(key) for key in path[1:])])


def path_part(key: Any) -> str:
    """One step of a pytree path as text: the key, index or attribute name."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return keystr((key,)).strip("[].'\"")


def check_signature(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise CaptureError when `model.forward` cannot be called with these arguments; it names the argument."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        given = [f"{len(args)} positional"] * bool(args) + sorted(kwargs)
        raise CaptureError(
            f"the example inputs do not fit {type(model).__name__}.forward: {error} (given: {', '.join(given)}). "
            f"Its signature is forward{inspect.signature(model.forward)}; pass a dict for keyword arguments, a "
            "tuple for positional ones."
        ) from None


def find_batch_dims(
    names: Sequence[str], tensors: Sequence[Tensor], batch_dims: Mapping[str, int | None] | None
) -> tuple[int | None, ...]:
    """The batch dim of each tensor, None where it has none. Raises ConfigurationError for unknown names or dims."""
    given = dict(batch_dims or {})
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ConfigurationError(f"batch_dims names {unknown}, but the inputs are {sorted(names)}")
    for name, tensor in zip(names, tensors, strict=True):
        dim = given.get(name)
        if dim is not None and not 0 <= dim < tensor.dim():
            raise ConfigurationError(f"batch_dims[{name!r}] = {dim}, but its shape is {tuple(tensor.shape)}")
    batch = _common_batch(names, tensors, given)
    return tuple(
        given[name] if name in given else _leading_batch_dim(name, tensor, batch)
        for name, tensor in zip(names, tensors, strict=True)
    )


def _common_batch(names: Sequence[str], tensors: Sequence[Tensor], given: Mapping[str, int | None]) -> int | None:
    stated = [t.shape[dim] for n, t in zip(names, tensors, strict=True) if (dim := given.get(n)) is not None]
    sizes = stated or [t.shape[0] for n, t in zip(names, tensors, strict=True) if n not in given and t.dim() > 0]
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def _leading_batch_dim(name: str, tensor: Tensor, batch: int | None) -> int | None:
    if tensor.dim() > 0 and tensor.shape[0] == batch:
        return 0
    log.info("input %s of shape %s has no batch dim (batch %s): replicated", name, tuple(tensor.shape), batch)
    return None


def unflatten_inputs(spec: TreeSpec, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inverse of `flatten_inputs`."""
    args, kwargs = spec.unflatten(list(leaves))
    return args, kwargs

"""Which expert every (token, choice) pair of a traced model chose, read from what the model does to the routing.

    chosen = logits.topk(k).indices        every entry is an expert below logits.shape[-1]
    chosen == 2                            mask of the pairs of expert 2
    one_hot(chosen, E).permute(2, 1, 0)    [2] is the mask of expert 2
    mask.any(), mask.sum(), ...            whether expert 2 has rows: taken as yes, since no rows would add nothing

`Routing` keeps these facts beside the tensors, for as long as they live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.capture.expert_rows import ExpertChoice, SelectedMatrix

Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Mask:
    """Pairs that chose `expert`; dim i of the mask is axis axes[i] of the pairs. leading: one more dim of size 1;
    merged: the axes are one dim."""

    choice: ExpertChoice
    expert: int
    axes: tuple[int, ...]
    leading: bool = False
    merged: bool = False


@dataclass(frozen=True, eq=False)
class _Ids:
    """Integers in [0, limit); distinct along the last dim, as top-k gives them, or not known to be."""

    limit: int
    distinct: bool


@dataclass(eq=False)
class _OneHot:
    """At most one entry along `dim` is not zero, and only the first `limit` can be; choice: made when first asked."""

    dim: int
    limit: int
    distinct: bool
    ids: Tensor | None = None
    choice: ExpertChoice | None = None


@dataclass(frozen=True, eq=False)
class _Marked:
    """Per token a one at each expert that it chose: ids scattered along `dim`."""

    dim: int
    limit: int


@dataclass(frozen=True, eq=False)
class _Hit:
    """Per expert how many pairs chose it."""

    limit: int


class Number:
    """How many rows an expert has, which only the data says: it can be compared with 0 and nothing else."""

    def __eq__(self, other: object) -> bool:
        return False if other == 0 else self._refuse()

    def __gt__(self, other: object) -> bool:
        return True if other == 0 else self._refuse()

    def __le__(self, other: object) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self) -> bool:
        raise ValueError("the number of rows of an expert depends on the data; only a comparison with 0 can be traced")


class Expert(int):
    """The number of an expert as a tensor of size 1, an element of `Hits`."""

    def __getitem__(self, index: object) -> int:
        return int(self)

    def item(self) -> int:
        """The number itself."""
        return int(self)

    def squeeze(self, *dims: int) -> int:
        """The number itself."""
        return int(self)


class Hits(list[Expert]):
    """All experts, where the model asks for those that have rows."""

    def tolist(self) -> list[int]:
        """Their numbers."""
        return [int(expert) for expert in self]

    def flatten(self, *dims: int) -> list[int]:
        """Their numbers."""
        return self.tolist()

    squeeze = view = reshape = flatten


_KEEPING = frozenset(("to", "long", "int", "bool", "float", "contiguous", "detach", "clone", "type_as"))
_RESHAPING = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "expand")
_VIEWS = frozenset((*_RESHAPING, "transpose", "permute", "t", "__getitem__", "gather"))
_PRODUCTS = frozenset(("mul", "multiply", "__mul__", "__rmul__", "__and__", "logical_and", "bitwise_and"))
_COMPARED = {"eq": "eq", "__eq__": "eq", "gt": "gt", "__gt__": "gt", "greater": "gt", "ne": "gt", "__ne__": "gt"}


class Routing:
    """Facts about the tensors of a trace; `follow` reads them off every call, `answer` gives what data would say."""

    def __init__(self) -> None:
        self._facts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._choices: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._viewed: list[Tensor] = []
        self._bases: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # reshaped ids -> the ids

    def mask_of(self, value: Any) -> Mask | None:
        """The mask that a tensor is, without a leading dim."""
        fact = self._fact(value)
        return fact if isinstance(fact, Mask) and not fact.leading else None

    def counts_rows(self, value: Any) -> bool:
        """Whether a tensor says per expert how many rows it has."""
        return isinstance(self._fact(value), _Hit) and value.dim() == 1 and value.dtype == torch.int64

    def selected(self, value: Tensor) -> SelectedMatrix | None:
        """The matrix of one expert that a tensor is."""
        fact = self._fact(value)
        return fact if isinstance(fact, SelectedMatrix) else None

    def answer(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """(True, result) where the result depends on the routing: which experts have rows, and whether one has any."""
        fact, name = self._fact(args[0]) if args else None, getattr(func, "__name__", "")
        if name == "__getitem__" and isinstance(args[1], Expert):
            return True, self._item(args[0], args[1])
        if isinstance(fact, _Hit) and name == "nonzero":
            return True, Hits(map(Expert, range(fact.limit)))
        if isinstance(fact, _Ids) and name in ("unique", "_unique2", "unique_consecutive") and not kwargs:
            return True, Hits(map(Expert, range(fact.limit)))
        if isinstance(fact, Number):
            return self._answer_number(name, args)
        if isinstance(fact, _Ids) and name == "bincount":
            return self._answer_count(fact, *args, **kwargs)
        return False, None

    def _item(self, tensor: Tensor, expert: Expert) -> Tensor:
        """`tensor[expert]` where `expert` is an element of `Hits`, a tensor of size 1: the first dim stays."""
        item, fact = tensor[int(expert) : int(expert) + 1], self._fact(tensor)
        mask = self._mask_in(fact, tensor, int(expert)) if isinstance(fact, _OneHot) else None
        if mask is not None:
            self._facts[item] = replace(mask, leading=True)
        return item

    def _answer_number(self, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        if name in ("__bool__", "item"):
            return True, name == "__bool__" or Number()
        if name in _COMPARED and len(args) > 1 and not isinstance(args[1], Tensor) and args[1] == 0:
            return True, _COMPARED[name] == "gt"
        return False, None

    def _answer_count(self, fact: _Ids, ids: Tensor, weights: Any = None, minlength: int = 0) -> tuple[bool, Any]:
        """bincount of ids below `minlength` has a static length."""
        if weights is not None or minlength < fact.limit:
            return False, None
        counts = ids.new_zeros(minlength).scatter_add(0, ids, torch.ones_like(ids))
        self._facts[counts] = _Hit(fact.limit)
        return True, counts

    def follow(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Learn from one call."""
        name = getattr(func, "__name__", "")
        if name in ("topk", "sort"):
            self._learn_order(name, args, kwargs, result[1])
        elif not isinstance(result, Tensor) or not args:
            return
        elif name in ("argmax", "argsort", "argmin"):
            self._learn_order(name, args, kwargs, result)
        elif name in ("scatter", "scatter_") and isinstance(self._fact(args[2]), _Ids):
            self._facts[result] = _Marked(args[1] % result.dim(), result.shape[args[1]])
        elif name == "one_hot":
            self._learn_one_hot(args[0], result)
        elif name in _COMPARED and _COMPARED[name] == "eq" and self._is_routing(args):
            self._facts[result] = self._mask(self._choice_of(args[0]), int(args[1]))
        else:
            fact = self._derived(func, name, args, kwargs, result)
            if fact is not None:
                self._facts[result] = fact

    def _fact(self, value: Any) -> Any:
        return self._facts.get(value) if isinstance(value, Tensor) else None  # type: ignore[no-untyped-call]

    def _is_routing(self, args: tuple[Any, ...]) -> bool:
        whole = (
            len(args) > 1
            and isinstance(args[0], Tensor)
            and not args[0].is_floating_point()
            and args[0].dtype != torch.bool
        )
        return whole and args[0].dim() > 0 and isinstance(args[1], int) and not isinstance(args[1], bool)

    def _choice_of(self, ids: Tensor) -> ExpertChoice:
        """One choice per shape of the same ids, which a loop may reshape anew for every expert."""
        by_shape = self._choices.setdefault(self._bases.get(ids, ids), {})  # type: ignore[no-untyped-call]
        if ids.shape not in by_shape:
            fact = self._fact(ids)
            known = isinstance(fact, _Ids)
            by_shape[ids.shape] = ExpertChoice(ids, known, known and fact.distinct)
        choice: ExpertChoice = by_shape[ids.shape]
        return choice

    def _mask(self, choice: ExpertChoice, expert: int, leading: bool = False) -> Mask:
        return Mask(choice, expert, tuple(range(len(choice.shape))), leading)

    def _learn_order(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], indices: Tensor) -> None:
        at = 2 if name == "topk" else 1
        dim = kwargs.get("dim", args[at] if len(args) > at else -1)
        if dim is not None and args[0].dim():
            last = dim % args[0].dim() == args[0].dim() - 1
            self._facts[indices] = _Ids(args[0].shape[dim], last and name not in ("argmax", "argmin"))

    def _learn_one_hot(self, ids: Tensor, result: Tensor) -> None:
        known = self._fact(ids)
        limit, distinct = (known.limit, known.distinct) if isinstance(known, _Ids) else (result.shape[-1], False)
        self._facts[result] = _OneHot(result.dim() - 1, min(limit, result.shape[-1]), distinct, ids)

    def _derived(self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Any:
        fact = self._fact(args[0])
        if fact is None and len(args) > 1:
            fact = self._fact(args[1]) if name in _PRODUCTS else None
        if isinstance(fact, _Ids):
            return self._derived_ids(fact, name, args, result)
        if isinstance(fact, _OneHot):
            return self._derived_one_hot(fact, name, args, kwargs, result)
        if isinstance(fact, Mask):
            return self._derived_mask(fact, name, args, kwargs, result)
        if isinstance(fact, _Marked):
            counted = name == "sum" and result.dim() == 1 and fact.dim == args[0].dim() - 1
            return fact if name in _KEEPING else _Hit(fact.limit) if counted else None
        if isinstance(fact, _Hit):
            return fact if name in _KEEPING or name in _COMPARED else Number() if name == "__getitem__" else None
        if isinstance(fact, SelectedMatrix):
            turned = result.dim() == 2 and result.shape == fact_shape(fact)[::-1] and _turns(func, name)
            return replace(fact, turned=not fact.turned) if turned else None
        return self._selection(name, args, result)

    def _derived_ids(self, fact: _Ids, name: str, args: tuple[Any, ...], result: Tensor) -> Any:
        if name in _KEEPING:
            return fact
        if name in ("view", "reshape"):
            self._bases[result] = self._bases.get(args[0], args[0])  # type: ignore[no-untyped-call]
        rows = name in ("view", "reshape") and result.dim() > 0 and result.shape[-1] == args[0].shape[-1]
        return _Ids(fact.limit, fact.distinct and rows) if name in _VIEWS else None

    def _selection(self, name: str, args: tuple[Any, ...], result: Tensor) -> Any:
        if name == "__getitem__" and isinstance(args[1], int) and args[0].dim() > 1 and args[0].is_floating_point():
            origin = self._facts.get(args[0]) or (id(args[0]),)  # type: ignore[no-untyped-call]
            return SelectedMatrix(args[0], origin, int(args[1])) if isinstance(origin, tuple) else None
        if name in ("view", "reshape") and args[0].is_floating_point() and result.dim() == 3 and args[0].dim() == 2:
            self._viewed.append(args[0])  # while it lives, its id is its own
            return (id(args[0]), args[0]._version, *map(str, args[1:]))
        return None

    def _derived_one_hot(
        self, fact: _OneHot, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Any:
        if name in _KEEPING:
            return fact
        if name in _PRODUCTS:
            return _OneHot(fact.dim, fact.limit, fact.distinct) if result.shape == args[0].shape else None
        if name in ("permute", "transpose"):
            return self._permuted(fact, name, args, result)
        if name in ("view", "reshape", "flatten"):
            same = fact.dim == args[0].dim() - 1 and result.shape[-1] == args[0].shape[-1]
            ids = None if fact.ids is None or not same else fact.ids.reshape(result.shape[:-1])
            return _OneHot(result.dim() - 1, fact.limit, fact.distinct, ids) if same else None
        if name == "sum":
            kept = result.dim() == 1 and result.shape[0] == args[0].shape[fact.dim]
            return _Hit(fact.limit) if kept else None
        if name == "__getitem__":
            return self._mask_in(fact, args[0], args[1])
        return None

    def _permuted(self, fact: _OneHot, name: str, args: tuple[Any, ...], result: Tensor) -> _OneHot:
        rank = result.dim()
        order = list(range(rank))
        if name == "permute":
            dims = args[1] if isinstance(args[1], tuple | list) else args[1:]
            order = [dim % rank for dim in dims]
        else:
            first, second = args[1] % rank, args[2] % rank
            order[first], order[second] = second, first
        others = [dim for dim in order if dim != fact.dim]
        ids = None if fact.ids is None else fact.ids.permute([dim - (dim > fact.dim) for dim in others])
        return _OneHot(order.index(fact.dim), fact.limit, fact.distinct, ids)

    def _mask_in(self, fact: _OneHot, one_hot: Tensor, key: Any) -> Mask | None:
        """`one_hot[e]`, `one_hot[..., e]`, `one_hot[:, e]`: the mask of expert e."""
        parts = key if isinstance(key, tuple) else (key,)
        expert = parts[-1]
        if not isinstance(expert, int) or isinstance(expert, bool):
            return None
        at = one_hot.dim() - 1 if len(parts) == 2 and parts[0] is Ellipsis else len(parts) - 1
        if at != fact.dim or any(part != slice(None) for part in parts[:-1] if part is not Ellipsis):
            return None
        if fact.choice is None:
            ids = fact.ids if fact.ids is not None else _chosen(one_hot, fact.dim)
            fact.choice = ExpertChoice(ids, True, fact.distinct)
        return self._mask(fact.choice, int(expert), leading=False)

    def _derived_mask(
        self, fact: Mask, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Any:
        if name in _KEEPING or (name == "squeeze" and result.shape == args[0].shape):
            return fact
        if name == "squeeze" and fact.leading and tuple(args[1:]) == (0,):
            return replace(fact, leading=False)
        if name in ("any", "sum", "count_nonzero") and result.dim() == 0:
            return Number() if fact.choice.known else None
        if (
            name == "any"
            and fact.choice.distinct
            and result.dim() == args[0].dim() - 1
            and len(fact.axes) == args[0].dim()
        ):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1) % args[0].dim()
            return replace(fact, axes=fact.axes[:dim] + fact.axes[dim + 1 :])
        if name in ("view", "reshape", "flatten") and result.dim() == 1 and len(fact.axes) > 1:
            return replace(fact, merged=True)
        return None


def fact_shape(fact: SelectedMatrix) -> tuple[int, ...]:
    """Shape of the matrix that `fact` selects."""
    shape = tuple(fact.source.shape[1:])
    return shape[::-1] if fact.turned else shape


def _turns(func: Function, name: str) -> bool:
    properties = (Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
    return name in ("t", "transpose", "swapaxes") or any(func == turn for turn in properties)


def _chosen(one_hot: Tensor, dim: int) -> Tensor:
    """Where the one entry along `dim` stands; -1 without one."""
    return one_hot.argmax(dim).masked_fill(~one_hot.bool().any(dim), -1)

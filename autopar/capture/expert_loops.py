"""Loops over experts that a model writes out itself, read while it is traced and replaced by one product per layer.

    for e, expert in enumerate(self.experts):
        token, choice = torch.where(chosen == e)                              # how many rows: depends on the data
        out.index_add_(0, token, expert(x[token]) * weight[token, choice, None])

`chosen == e`, and masks cut from a `one_hot`, say which expert every (token, choice) pair has. What follows on the
rows of one expert is written down as a formula (`expert_rows.py`) beside a trace on all pairs that nobody reads.
When `out` is next looked at, the formulas of all experts are evaluated at once, each row with its own expert's
parameters. Questions for whether an expert has rows are answered yes: no rows would add nothing. What cannot be
read so is a CaptureError with the line.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar._compat import DynamicOutputShapeException, tree_leaves, tree_map
from autopar.capture.expert_groups import Sizes, joined, lists_as_sizes, position_in, split_sizes
from autopar.capture.expert_rows import AllExperts, ExpertChoice, Position, Row, Unlike
from autopar.capture.routing import Mask, Routing
from autopar.errors import CaptureError

log = logging.getLogger(__name__)

_INDEX_ADD = (Tensor.index_add_, Tensor.index_add, torch.index_add)
_ADDED = ("__iadd__", "add_", "__add__", "__radd__", "add")
_JOINING = ("cat", "concat", "concatenate")
_INDEXING = ("__getitem__", "__setitem__")
_ARITHMETIC = ("add", "sub", "mul", "div", "pow", "neg", "abs", "maximum", "minimum", "where", "masked_fill")
_OPERATORS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__pow__", "__neg__")
_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_", "relu_")
_FUNCTIONS = ("exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "clamp", "clamp_min", "erf", "sin", "cos")
_ACTIVATIONS = ("sigmoid", "tanh", "relu", "relu6", "gelu", "silu", "elu", "leaky_relu", "softplus", "mish")
_CASTS = ("to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach")
_SHAPES = ("view", "reshape", "squeeze", "unsqueeze", "flatten")
_LAYERS = ("hardtanh", "hardswish", "dropout", "layer_norm", "rms_norm")
_ROWWISE = frozenset((*_ARITHMETIC, *_OPERATORS, *_IN_PLACE, *_FUNCTIONS, *_ACTIVATIONS, *_CASTS, *_SHAPES, *_LAYERS))
"""Functions that treat every row by itself, whatever their arguments."""
_PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "__matmul__": 0, "addmm": 1}
"""Products, and which argument has the rows."""
_REDUCTIONS = ("softmax", "log_softmax", "sum", "mean", "cat", "unbind", "glu", "amax", "amin")
_ALONG_A_DIM = {"chunk": 2, "split": 2, **dict.fromkeys(_REDUCTIONS, 1)}
"""Functions that keep rows apart unless their dim, the argument at this place, is the first."""
_QUESTIONS = frozenset(
    ("dim", "size", "numel", "nelement", "__len__", "is_floating_point", "__get__", "stride", "is_contiguous")
)
_LIBRARIES = tuple(str(Path(module).parent) for module in (torch.__file__, __file__))


@dataclass(eq=False)
class _Pending:
    """What waits to be written: (positions, row) per expert; added to what stands there, or put in its place."""

    target: Tensor
    added: bool
    entries: list[tuple[Position, Row]] = field(default_factory=list)


class ExpertLoops(TorchFunctionMode):
    """Within the mode, loops over experts with data-dependent rows trace as products with one matrix per row."""

    def __init__(self) -> None:
        super().__init__()
        self._routing = Routing()
        self._replaced = contextlib.ExitStack()
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> Position or Row
        self._pending: dict[int, _Pending] = {}
        self._asked: dict[ExpertChoice, set[int]] = {}  # whose rows were picked
        self._groups: dict[ExpertChoice, int] = {}  # choices of sorted rows -> number of groups
        self._stale: set[Row] = set()  # rows read from what the loop is about to write
        self._alone: Counter[ExpertChoice] = Counter()  # how often one expert alone was written

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        answered, result = self._routing.answer(func, args, kwargs)
        if answered:
            return result
        name = getattr(func, "__name__", "")
        mask = self._routing.mask_of(args[0]) if args else None
        if mask is not None and _asks_where(name, args, kwargs):
            return self._where(args[0], mask)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        try:
            sizes = split_sizes(name, args, kwargs)
            if sizes is not None:
                return self._split(args[0], sizes)
            takes_part = any(leaf in self._known for leaf in leaves)
            if takes_part or (name in _INDEXING and self._is_mask(args[1]) and not self._is_plain_write(name, args)):
                return self._on_rows(func, name, args, kwargs)
            if name in _QUESTIONS and not isinstance(answer := func(*args, **kwargs), Tensor):
                return answer  # of a sum of experts, too: its dtype and shape do not wait for all of them
            self._settle(leaves)
        except Unlike as difference:
            if not self._is_loop():
                raise DynamicOutputShapeException(torch.ops.aten.index.Tensor) from difference
            raise CaptureError(_explanation(str(difference))) from difference
        result = func(*args, **kwargs)
        self._routing.follow(func, args, kwargs, result)
        return result

    def _is_mask(self, key: Any) -> bool:
        return any(self._routing.mask_of(part) is not None for part in _as_tuple(key))

    def _is_loop(self) -> bool:
        """Whether rows were picked for experts: from a choice that a router made, or for more than two numbers."""
        return any(choice.known or len(experts) > 2 for choice, experts in self._asked.items())

    def _is_plain_write(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether `x[mask] = value` writes what is no row of an expert: a value that is the same for all rows."""
        return name == "__setitem__" and not isinstance(self._leaf_formula(args[2]), Row)

    def _where(self, mask: Tensor, fact: Mask) -> tuple[Tensor, ...]:
        """Index tensors along every dim of the mask, of all pairs; they are remembered as positions."""
        self._asked.setdefault(fact.choice, set()).add(fact.expert)
        found = []
        for dim, axes in enumerate([fact.axes] if fact.merged else [(axis,) for axis in fact.axes]):
            shape = [1] * mask.dim()
            shape[dim] = mask.shape[dim]
            index = torch.arange(mask.shape[dim], device=mask.device).view(shape).expand(mask.shape).reshape(-1)
            self._known[index] = Position(fact.choice, fact.expert, axes, fact.merged)
            found.append(index)
        return tuple(found)

    def _split(self, rows: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        """The rows sorted by expert, as one group per expert."""
        if rows in self._known:
            raise Unlike("groups of the rows of one expert")
        choice = sizes.choice(rows.shape[0])
        self._groups[choice] = len(sizes)
        formulas = [Row(Tensor.__getitem__, (rows, Position(choice, e, (0,))), {}) for e in range(len(sizes))]
        return tuple(self._remember(rows.clone(), formula, "split") for formula in formulas)

    def _joined(self, tensors: Any) -> Tensor | None:
        """The rows of all groups in order, where `tensors` are those."""
        formulas = [self._leaf_formula(tensor) for tensor in tensors]
        if not all(isinstance(formula, Row) for formula in formulas):
            return None
        positions = [position_in(formula) for formula in formulas]
        whole = [p.expert for p in positions if p is not None and self._groups.get(p.choice) == len(formulas)]
        return joined(formulas) if whole == list(range(len(formulas))) else None

    def _on_rows(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _QUESTIONS and not kwargs:
            return func(*args)
        if func in _INDEX_ADD:
            return self._index_add(func, *args, **kwargs)
        if name in _INDEXING:
            return self._index(name, *args)
        rows = self._joined(args[0]) if name in _JOINING and _along_first(args, kwargs) else None
        if rows is not None:
            return rows
        self._check(func, name, args, kwargs)
        dense = func(*args, **kwargs)
        formula = Row(func, self._formula(args), self._formula(kwargs))
        if any(part in self._stale for part in formula.args if isinstance(part, Row)):
            if name not in _ADDED:
                raise Unlike("what the loop has written is read before the loop ends")
            self._stale.add(formula)
        return self._remember(dense, formula, name)

    def _formula(self, value: Any) -> Any:
        """An argument with tensors replaced by what is known about them."""
        return tree_map(self._leaf_formula, value)

    def _leaf_formula(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        known = self._known.get(leaf)  # type: ignore[no-untyped-call]
        found = self._routing.selected(leaf) if known is None else known
        return leaf if found is None else found

    def _remember(self, dense: Any, formula: Row, name: str) -> Any:
        if isinstance(dense, tuple | list):
            for item, part in enumerate(dense):
                self._remember(part, Row(formula.function, (formula,), {}, item), name)
        elif dense.dim() == 0:
            raise Unlike(f"{name} over the rows of one expert")
        else:
            self._known[dense] = formula
        return dense

    def _check(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises Unlike unless the function treats every row by itself."""
        if name in _PRODUCTS:
            others = [arg for at, arg in enumerate(args) if at != _PRODUCTS[name]]
            apart = not any(isinstance(self._known.get(arg), Row) for arg in others if isinstance(arg, Tensor))  # type: ignore[no-untyped-call]
        elif name in _ALONG_A_DIM:
            place = _ALONG_A_DIM[name]
            default = -1 if name == "glu" else 0
            dims = kwargs.get("dim", args[place] if len(args) > place else default)
            apart = dims is not None and all(
                dim == -1 or dim > 0 for dim in (dims if isinstance(dims, tuple | list) else [dims])
            )
        else:
            apart = name in _ROWWISE and not self._has_foreign_rows(args)
        if not apart:
            raise Unlike(f"{name} on the rows of one expert")

    def _has_foreign_rows(self, args: tuple[Any, ...]) -> bool:
        """Whether an operand that is no row has a first dim that lies beside the rows."""
        tensors = [arg for arg in tree_leaves(args) if isinstance(arg, Tensor)]
        rank = max(tensor.dim() for tensor in tensors)
        return any(t.dim() == rank and t.shape[0] != 1 and not isinstance(self._known.get(t), Row) for t in tensors)  # type: ignore[no-untyped-call]

    def _index(self, name: str, source: Tensor, key: Any, *value: Any) -> Any:
        """`source[key]` or `source[key] = value` where rows of one expert take part."""
        dense_key, formula_key = self._keys(key)
        position = next((part for part in _as_tuple(formula_key) if isinstance(part, Position)), None)
        if name == "__setitem__":
            return self._set(source, formula_key, position, *value)
        if position is None:
            first = _as_tuple(key)[0]
            if first is not Ellipsis and first != slice(None):
                raise Unlike("some rows of one expert")
            return self._remember(source[key], Row(Tensor.__getitem__, (self._formula(source), key), {}), name)
        formula = Row(Tensor.__getitem__, (self._formula(source), formula_key), {})
        if any(_storage(source) == _storage(pending.target) for pending in self._pending.values()):
            self._stale.add(formula)
        return self._remember(source[dense_key], formula, name)

    def _set(self, target: Tensor, key: Any, position: Position | None, value: Any) -> None:
        """`target[key] = value`; `target[key] += value` arrives here as the sum that is written back."""
        row = self._formula(value)
        if position is None or not isinstance(row, Row) or _as_tuple(key)[0] is not position:
            raise Unlike("an assignment of what is no row of one expert")
        parts = list(row.args) if getattr(row.function, "__name__", "") in _ADDED and not row.kwargs else []
        summands = [part for part in parts if not _reads(part, target, position)]
        if len(parts) == 2 and len(summands) == 1:
            self._wait(target, position, summands[0], added=True)
        else:
            self._wait(target, position, row, added=False)

    def _index_add(
        self, func: Callable[..., Any], target: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
    ) -> Tensor:
        position, row = self._formula(index), self._formula(source)
        if not isinstance(position, Position) or not isinstance(row, Row) or dim % target.dim() or alpha != 1:
            raise Unlike("an index_add of what is no row of one expert along dim 0")
        result = target
        if func is not Tensor.index_add_:
            result = target.clone()
            earlier = self._pending.get(id(target))
            if earlier is not None:
                self._pending[id(result)] = _Pending(result, earlier.added, list(earlier.entries))
        self._wait(result, position, row, added=True)
        return result

    def _wait(self, target: Tensor, position: Position, row: Any, added: bool) -> None:
        """Remember a write; the earlier ones are done first unless they belong to other experts of the same loop."""
        if not isinstance(row, Row) or row in self._stale:
            raise Unlike("a sum of what is no row of one expert")
        pending = self._pending.get(id(target))
        if pending is not None and not _continues(pending, position, added):
            self._settle([target])
            pending = None
        if pending is None:
            pending = self._pending[id(target)] = _Pending(target, added)
        pending.entries.append((position, row))

    def __enter__(self) -> ExpertLoops:
        self._replaced.enter_context(lists_as_sizes(self._routing.counts_rows))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._replaced.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is not None:
            return
        self._settle([pending.target for pending in self._pending.values()])
        for choice, times in self._alone.items():
            if times > 1 and len(self._asked.get(choice, ())) > 2:
                log.warning(
                    "a loop over %d experts reads what it adds up before it has ended: every expert computes the rows "
                    "of all, one after the other; read it behind the loop",
                    len(self._asked[choice]),
                )

    def _settle(self, leaves: Sequence[Tensor]) -> None:
        """Write what waits for tensors that share memory with one of `leaves`."""
        if not self._pending:
            return
        read = {_storage(leaf) for leaf in leaves}
        for key, pending in list(self._pending.items()):
            if _storage(pending.target) in read:
                del self._pending[key]
                if len({where.expert for where, _ in pending.entries}) == 1:
                    self._alone[pending.entries[0][0].choice] += 1
                _write(pending)

    def _keys(self, key: Any) -> tuple[Any, Any]:
        """The key on all pairs, and the key as a formula."""
        dense: list[Any] = []
        formula: list[Any] = []
        for part in _as_tuple(key):
            mask = self._routing.mask_of(part)
            if mask is not None:
                dense.extend(self._where(part, mask))
                formula.append(Position(mask.choice, mask.expert, mask.axes, mask.merged))
            else:
                dense.append(part)
                formula.append(self._leaf_formula(part))
        return tuple(dense), tuple(formula)


def _along_first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("dim", args[1] if len(args) > 1 else 0) == 0)


def _write(pending: _Pending) -> None:
    """All experts at once."""
    entries = sorted(pending.entries, key=lambda entry: entry[0].expert)
    position = entries[0][0]
    experts = AllExperts(position.choice, [where.expert for where, _ in entries], position.axes)
    target, shape = pending.target, position.shape
    if tuple(target.shape[: len(shape)]) != shape:
        raise Unlike(f"rows of a tensor of {tuple(target.shape)}, of which {shape} are chosen")
    total = experts.weighted_sum(experts.value([row for _, row in entries])).to(target.dtype)
    total = total.reshape(*shape, *total.shape[len(position.axes) :])
    if pending.added:
        target.add_(total)
    else:
        chosen = experts.chosen().reshape(*shape, *(1,) * (target.dim() - len(shape)))
        target.copy_(torch.where(chosen, total, target))


def _continues(pending: _Pending, position: Position, added: bool) -> bool:
    """Whether a write belongs to another expert of the loop that is waiting."""
    first = pending.entries[0][0]
    same = _axes(first) == _axes(position) and pending.added == added
    return same and all(where.expert != position.expert for where, _ in pending.entries)


def _reads(part: Any, target: Tensor, position: Position) -> bool:
    """Whether a formula is `target[position]`."""
    if not isinstance(part, Row) or part.function != Tensor.__getitem__ or part.args[0] is not target:
        return False
    key = _as_tuple(part.args[1])
    found = key[0]
    if len(key) > 1 or not isinstance(found, Position):
        return False
    return found.expert == position.expert and _axes(found) == _axes(position)


def _axes(position: Position) -> tuple[Any, ...]:
    return position.choice, position.axes, position.merged


def _asks_where(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name == "where":
        return len(args) == 1 and not kwargs
    return name == "nonzero" and bool(kwargs.get("as_tuple"))


def _as_tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _explanation(difference: str) -> str:
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith((*_LIBRARIES, "<"))]
    place = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"
    return (
        f"the loop over experts at or before {place} cannot be traced as one product: {difference}. Let every expert "
        "compute row by row with modules of one structure, and add its rows with index_add_; or call "
        "torch.ops.autopar.expert_linear(rows, weight, expert_ids, transposed) with stacked weights"
    )

"""The rule language: one string says how an operator may be split.

    m k, k n -> m n                              matrix product: m and n are split; k leaves Partial(sum)
    b (h g) s d, b h t d, b h t d -> b (h g) s d     fused dim: h heads of g queries each, h outermost
    ... -> ... ; whole: dim                      softmax: every dim but the one that argument `dim` names

Tensors are separated by commas, operands before the arrow (in the order of `tensor_operands`), outputs after it.
Nothing before the arrow: no operand (a lone operand without dims is `[...]`); nothing after it: an output without dims.

Dims of a tensor, separated by blanks:
    name      may be split over a mesh axis; equal names have equal sizes
    [name]    stays whole; its size may be used in `flops` and to infer others
    _         stays whole, any size
    1         has size 1
    s+3, s-1  the rows of s and 3 more, or 1 less: split as s is, in blocks of its own; what splits s needs `by`
    (a [b])   fused: factors, outermost first; sizes are inferred from the shapes and from other occurrences; a factor
              in a fused dim is split only where it divides evenly. A split of an inner factor is a strided shard: each
              rank holds a piece of every outer one. (Strided shards of fused q|k|v come from the views behind them.)
    ...       all remaining dims, one name each (d0, d1, ...), aligned at the right; size 1 broadcasts
    [...]     all remaining dims, whole
    a...      all remaining dims, named a0, a1, ...
    a...{x}   the same, but those that an argument names (`at: dim`, `at: dim1 dim2`) are x, a dim as above; with
              nothing in the braces the tensor lacks them: `a...{_} -> a...{} _ ; at: dim1 dim2` is a diagonal
Tensors:
    x?        may be missing (missing ones are dropped from the right)
    x*        repeated for all further operands (outputs)
Sizes that cannot be inferred are given as `; h = 4`, or as an argument of the operator: `; g = group`. Names of size 1
(or 0) are no choice and vanish.

What a split leaves. A name that an output lacks leaves Partial(sum) there. Annotations after `;` say otherwise:
    k: max                      leaves Partial(max) (min, sum; or, and: Partial(max), Partial(min) of bools)
    b: - sum sum                per output; `-`: that output is the same on every coordinate
    v: sum by masked_embedding  needs that implementation, which leaves Partial(sum)
    b: by synchronised_batch_norm bytes 8*c      the implementation completes the outputs; it all-reduces 8*c bytes
    ...: by mixing              the same for every remaining dim
    s: by split_convolution edges 96             a halo: the implementation exchanges 96 bytes (of rows that are split
                                nowhere else) with the neighbouring blocks; a rank holds one range of s, never a strided
                                one. The input of a window of stride 2 is `(s [t])`, its output `s`, with `; t = 2`:
                                blocks of both lie above each other, and where they would not the dim is `[x]`, whole
    t+e: by dispatched_experts                   a pair: one axis splits both names, the second in one range per rank;
                                the implementation moves the rows of the first to where their part of the second is
    s: by ring_attention ring 4*b*h*s*d          blocks of that many bytes in all go around the ranks, from neighbour to
                                neighbour, while each is computed upon; `home 8*b*h*s*d`: as do those of what is found
                                for them, and once more, to where they began; `joins 10*b*h*g*s*e`: bytes that joining
                                what was found for one block to that for others reads and writes. Other names of the
                                products cut them; `before 1023 after 0`: an element needs those at most so far
                                before and behind it, and blocks go no further than that asks
Random operators have no word of their own: they draw by global element index, so a block draws its part of the whole.
Dims that an argument of the operator names (an int, a list, or None for all), where `...` stands:
    whole: dim                  stay whole
    drop: dim                   stay whole and are missing from the outputs (or have size 1 there)
    reduce: dim                 are missing from the outputs (or have size 1 there); a split leaves Partial(sum);
                                `reduce: dim max by extreme` as above; `reduce: all` needs no argument
Partial operands:
    linear: x x | x s           operands marked x may be Partial(sum) together, the others (-) replicated; s: replicated
                                and without dims. A pattern of another length than the operands is passed over;
                                `linear: all` marks every operand. Bools, and integers made from floats, pass none.
Costs:
    flops: 2*m*k*n              floating point operations of the whole operator: a sum of products of sizes
In flops, bytes and edges `...` is the product of the remaining dims, without those of `at`, and `output` the bytes of
the first output: `r...{n} -> r...{n} ; at: dim ; n: by split_softmax bytes 8*...` all-reduces two fp32 numbers per row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from autopar.errors import ConfigurationError

_NAME = re.compile(r"^[a-z]\w*$")
ELLIPSIS_NAME = re.compile(r"^d\d+$")
_ELLIPSIS = re.compile(r"^(?:([a-z]*)\.\.\.|\[\.\.\.\])(?:\{(.*)\})?$")
_TOKEN = re.compile(r"(?:\[\.\.\.\]|[a-z]*\.\.\.)(?:\{[^}]*\})?|\[\w+\]|[()]|\w+[+-]\d+|\w+|\S")
_MORE_ROWS = re.compile(r"^(\w+)([+-]\d+)$")
REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "or": "max", "and": "min"}
_OPTIONS = ("by", "bytes", "edges", "ring", "home", "joins", "before", "after")


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of a dim; name None: any size; whole: never split; more: rows that the dim has beside those of the
    name, of which it is the only factor."""

    name: str | None
    whole: bool
    more: int = 0


@dataclass(frozen=True, slots=True)
class Ellipsis:
    """Remaining dims: the prefix of their names (None: whole), and what stands at the dims of `at:` (None: a remaining
    dim like the others; (): nothing, the tensor lacks them; else one dim)."""

    prefix: str | None = "d"
    at: tuple[tuple[Factor, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorPattern:
    """Dims before and after the ellipsis (None: no ellipsis); each dim is its factors, outermost first."""

    before: tuple[tuple[Factor, ...], ...]
    after: tuple[tuple[Factor, ...], ...] | None = None
    ellipsis: Ellipsis = Ellipsis()
    optional: bool = False
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """What a split of a name leaves: reductions (one for all outputs that lack the name, or one per output), the
    implementation that it needs, the bytes that this all-reduces, those that it exchanges with the neighbours, those
    that go around the ranks, those that go around until they are home, those that joining blocks moves, and how far
    before and behind an element lies what it needs."""

    reductions: tuple[str | None, ...] = ("sum",)
    implementation: str | None = None
    bytes: str | None = None
    edges: str | None = None
    ring: str | None = None
    home: str | None = None
    joins: str | None = None
    before: str | None = None
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed string. attribute_dims: kind ("whole", "drop", "reduce") -> name of the argument; reduce_effect belongs
    to the names that "reduce" yields; at: arguments that name dims; sizes, size_arguments: name -> size, argument."""

    text: str
    operands: tuple[TensorPattern, ...]
    outputs: tuple[TensorPattern, ...]
    effects: dict[str, Effect] = field(default_factory=dict)
    attribute_dims: dict[str, str] = field(default_factory=dict)
    reduce_effect: Effect = Effect()
    linear: tuple[str, ...] = ()
    flops: str | None = None
    at: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    size_arguments: dict[str, str] = field(default_factory=dict)


@cache
def parse_pattern(text: str) -> Pattern:
    """Text -> pattern. Raises ConfigurationError repeating the text and the part that means nothing."""
    signature, *annotations = text.split(";")
    left, arrow, right = signature.partition("->")
    if not arrow:
        raise ConfigurationError(f"rule {text!r} has no '->' between operands and outputs")
    fields: dict[str, Any] = {"effects": {}, "attribute_dims": {}, "sizes": {}, "size_arguments": {}}
    for annotation in annotations:
        _read_annotation(annotation.strip(), fields, text)
    operands = tuple(_parse_tensor(tensor, text) for tensor in left.split(",")) if left.strip() else ()
    outputs = tuple(_parse_tensor(tensor, text) for tensor in right.split(","))
    return Pattern(text=text, operands=operands, outputs=outputs, **fields)


def _parse_tensor(tensor: str, text: str) -> TensorPattern:
    body = tensor.strip()
    optional, repeated = body.endswith("?"), body.endswith("*")
    tokens = _TOKEN.findall(body.rstrip("?*"))
    dims: list[tuple[Factor, ...]] = []
    ellipsis_at: int | None = None
    ellipsis = Ellipsis()
    fused: list[Factor] | None = None
    for token in tokens:
        if found := _ELLIPSIS.match(token):
            if ellipsis_at is not None or fused is not None:
                raise ConfigurationError(f"rule {text!r}: {body!r} may have one ellipsis, outside parentheses")
            ellipsis_at, ellipsis = len(dims), _parse_ellipsis(found, text)
        elif token == "(" and fused is None:
            fused = []
        elif token == ")" and fused is not None:
            dims.append(tuple(fused))
            fused = None
        elif token == "1" and fused is None:
            dims.append(())
        else:
            factor = _parse_factor(token, text)
            if fused is None:
                dims.append((factor,))
            elif factor.more:
                raise ConfigurationError(f"rule {text!r}: {token!r} stands alone in its dim, not in parentheses")
            else:
                fused.append(factor)
    if fused is not None:
        raise ConfigurationError(f"rule {text!r}: unclosed '(' in {body!r}")
    if ellipsis_at is None:
        return TensorPattern(tuple(dims), None, ellipsis, optional, repeated)
    return TensorPattern(tuple(dims[:ellipsis_at]), tuple(dims[ellipsis_at:]), ellipsis, optional, repeated)


def _parse_ellipsis(found: re.Match[str], text: str) -> Ellipsis:
    prefix = None if found[1] is None else found[1] or "d"
    if found[2] is None:
        return Ellipsis(prefix)
    inside = _parse_tensor(found[2], text)
    if inside.after is not None or len(inside.before) > 1:
        raise ConfigurationError(f"rule {text!r}: {found[0]!r} may have one dim in its braces, or nothing")
    return Ellipsis(prefix, inside.before)


def _parse_factor(token: str, text: str) -> Factor:
    if token == "_":
        return Factor(None, True)
    more = _MORE_ROWS.match(token)
    name = more[1] if more else token.strip("[]")
    if not _NAME.match(name) or ELLIPSIS_NAME.match(name):
        raise ConfigurationError(
            f"rule {text!r}: {token!r} is no dim; write name, [name], name+1, (a b), 1, _ or ... (d0, d1 are its)"
        )
    return Factor(name, token.startswith("["), int(more[2]) if more else 0)


def _read_annotation(annotation: str, fields: dict[str, Any], text: str) -> None:
    size = re.match(r"^(\w+)\s*=\s*(?:(\d+)|(\w+))$", annotation)
    if size and size[2]:
        fields["sizes"][size[1]] = int(size[2])
        return
    if size:
        fields["size_arguments"][size[1]] = size[3]
        return
    key, colon, value = (part.strip() for part in annotation.partition(":"))
    if not colon:
        raise ConfigurationError(f"rule {text!r}: {annotation!r} is neither 'name: ...' nor 'name = size'")
    if key == "flops":
        fields["flops"] = value
    elif key == "linear":
        fields["linear"] = tuple(pattern.strip() for pattern in value.split("|"))
    elif key == "at":
        fields["at"] = tuple(value.split())
    elif key in ("whole", "drop"):
        fields["attribute_dims"][key] = value
    elif key == "reduce":
        argument, _, rest = value.partition(" ")
        fields["attribute_dims"][key] = argument
        effect = _parse_effect(rest, text)
        fields["reduce_effect"] = effect if effect.reductions else replace(effect, reductions=("sum",))
    else:
        fields["effects"][key] = _parse_effect(value, text)


def _parse_effect(value: str, text: str) -> Effect:
    words = value.split()
    num_reductions = next((at for at, word in enumerate(words) if word in _OPTIONS), len(words))
    reductions = tuple(None if word == "-" else REDUCTIONS.get(word, word) for word in words[:num_reductions])
    options = dict(zip(words[num_reductions::2], words[num_reductions + 1 :: 2], strict=False))
    unknown = [word for word in reductions if word is not None and word not in REDUCTIONS]
    if unknown or set(options) - set(_OPTIONS) or (len(words) - num_reductions) % 2:
        raise ConfigurationError(
            f"rule {text!r}: cannot read {value!r}; write e.g. 'sum - by implementation bytes 8*c'"
        )
    return Effect(reductions, options.get("by"), *map(options.get, _OPTIONS[1:]))

"""A rule: which dims of an operator may be split over a mesh axis, and what that leaves.

Every dim of every tensor operand and output is a tuple of named factors, outermost first. A mesh axis picks ONE name;
every tensor that carries the name is sharded along that factor, tensors without it are replicated, and outputs listed
in `reductions` become Partial. `None` as a factor name is a factor that stays whole.

    mm:  inputs ((("m",), ("k",)), (("k",), ("n",)))   outputs ((("m",), ("n",)),)   reductions {"k": ("sum",)}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from autopar.ops.attention_blocks import Band

Dim: TypeAlias = tuple[str | None, ...]  # factors of one dim, outermost first; () for a dim of size 1
Tensor: TypeAlias = tuple[Dim, ...]
PAIR = "+"
"""Between two names that one axis splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTraffic:
    """What goes around the ranks of a ring, of all blocks together. nbytes: of what every rank computes upon; home: of
    what is found for it, which goes one hop further, to where its block began; joined: of what is read and written to
    join what a block gives to that of others; names, joined_names: those whose splits cut them; length: elements that
    are cut in blocks; band: where lies what an element needs (None: anywhere)."""

    nbytes: int
    home: int
    joined: int
    names: frozenset[str]
    joined_names: frozenset[str]
    length: int = 1
    band: Band | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The splits that an operator allows.

    inputs, outputs: one `Tensor` per tensor operand (in the order of `tensor_operands(node)`) and per output; an
        output that is no tensor is None.
    sizes: factor name -> global size.
    reductions: contracted name -> per output, the op of the Partial that it leaves ("sum", "max", "min"), or None if
        that output is unaffected (carries the name itself or is replicated as the implementation sees to it).
    linear: patterns over the operands: operands marked True may all be Partial("sum") together (the others
        replicated); then all outputs are Partial("sum").
    implementations: name -> implementation needed when the name is split ("masked_embedding", ...); other names
        need none: the operator runs unchanged on local tensors. "t+e": needed when an axis splits both names.
    synchronised_bytes: name -> bytes that the implementation all-reduces when the name is split (statistics of a
        batch norm).
    exchanged_bytes: name -> bytes of the rows at the edges of a block that the implementation exchanges with the
        neighbouring blocks, counted without any other split. Such a name is split into one range per rank.
    ring_traffic: name -> what goes around the ranks when the name is split.
    flops: of the whole operator.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]
    sizes: Mapping[str, int]
    reductions: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    linear: tuple[tuple[bool, ...], ...] = ()
    implementations: Mapping[str, str] = field(default_factory=dict)
    synchronised_bytes: Mapping[str, int] = field(default_factory=dict)
    exchanged_bytes: Mapping[str, int] = field(default_factory=dict)
    ring_traffic: Mapping[str, RingTraffic] = field(default_factory=dict)
    flops: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names that an axis may pick: carried or reduced by every output, or synchronised."""
        found: dict[str, None] = {}
        for tensor in (*self.inputs, *(output for output in self.outputs if output is not None)):
            for dim in tensor:
                found.update({factor: None for factor in dim if factor is not None})
        return tuple(found)

    @property
    def pairs(self) -> tuple[str, ...]:
        """Pairs of names that an axis may pick together, as "t+e"."""
        return tuple(name for name in self.implementations if PAIR in name)

    def needs_one_range(self, name: str) -> bool:
        """Whether a rank must hold one contiguous range of the name: masked lookups, halos and running sums address
        it so."""
        return name in self.exchanged_bytes or self.implementations.get(name, "").startswith(("masked", "prefix"))

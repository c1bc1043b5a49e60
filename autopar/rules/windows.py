"""Windows: which rows of its input an output row of a convolution or pooling reads, and how such a dim may be split.

    kernel 3, stride 2, padding 1, 8 rows -> 4 rows     output row j reads rows 2 j - 1 .. 2 j + 1
    input dim `(s [t])` with t = 2, output dim `s`      a block of 2 output rows needs 1 row before its 4 input rows

A dim may be split if the input has `stride` rows per output row (then blocks of both lie above each other), or if
the output has a few rows more or less than it (`s+3`: a causal convolution that is padded at both ends); otherwise it
stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.rules.call import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Along one dim, in rows."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def extent(self) -> int:
        """Rows from the first to the last that one output row reads."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def needs_halo(self) -> bool:
        """Whether output rows read beyond the `stride` rows of their own."""
        return self.padding > 0 or self.extent > self.stride

    def rows(self, start: int, length: int) -> tuple[int, int]:
        """(first, number) of the input rows that output rows start .. start + length read; may reach into padding."""
        return start * self.stride - self.padding, (length - 1) * self.stride + self.extent

    def aligns(self, size: int, output_size: int) -> bool:
        """Whether every output row has `stride` input rows, and no window lies beyond the padded input."""
        fits = (size + 2 * self.padding - self.extent) // self.stride + 1 == output_size
        return fits and size == self.stride * output_size

    def grows(self, size: int, output_size: int) -> bool:
        """Whether every output row has an input row, and a few have none or have none of theirs."""
        fits = self.stride == 1 and size + 2 * self.padding - self.extent + 1 == output_size
        return fits and are_a_few(output_size - size, size)

    def edge_rows(self) -> int:
        """Input rows that a block borrows from both sides together."""
        return self.padding + max(0, self.extent - self.stride - self.padding)


MOST_OTHER_ROWS = 4
"""An output is split as its input is if it has at most this part of the rows more or less: the rows that then change
ranks are few beside a block."""


def are_a_few(more: int, size: int) -> bool:
    """Whether a dim of `size` rows and one of `more` rows beside them are split alike."""
    return abs(more) * MOST_OTHER_ROWS <= size


@dataclass(frozen=True, slots=True)
class SpatialDims:
    """Dims of a rule string: `inputs` and `outputs` blank-separated, `sizes` as annotations; split: name -> window of
    the dims that may be split."""

    inputs: str
    outputs: str
    sizes: str
    split: dict[str, Window]
    edge_bytes: dict[str, int]

    def effects(self, implementation: str, reduction: str = "", exchanges: int = 1, always: bool = False) -> str:
        """Annotations of the names that need `implementation`, which exchanges the edges so many times; always: those
        without a halo, too."""
        return "".join(
            f" ; {name}: {reduction} by {implementation} edges {exchanges * self.edge_bytes[name]}"
            for name, window in self.split.items()
            if always or window.needs_halo
        )


def spatial_dims(
    windows: Sequence[Window],
    shape: Sequence[int],
    output: Sequence[int],
    item_bytes: int,
    allowed: Sequence[bool] | None = None,
    other_lengths: bool = False,
) -> SpatialDims:
    """How the last dims of an operator with `windows` may be split.

    shape, output: those of its input and output; allowed: dims that may be split at all; other_lengths: where the
    output may be a few rows longer or shorter than the input.
    """
    first, first_output = len(shape) - len(windows), len(output) - len(windows)
    inputs, outputs, sizes = [], [], ""
    split: dict[str, Window] = {}
    edge_bytes: dict[str, int] = {}
    for i, window in enumerate(windows):
        size, output_size = shape[first + i], output[first_output + i]
        grows = other_lengths and window.grows(size, output_size)
        if not (grows or window.aligns(size, output_size)) or (allowed is not None and not allowed[i]):
            inputs.append(f"[x{i}]")
            outputs.append(f"[y{i}]")
            continue
        name = f"s{i}"
        inputs.append(name if window.stride == 1 else f"({name} [t{i}])")
        more = output_size - size if grows else 0
        outputs.append(f"{name}{more:+d}" if more else name)
        sizes += "" if window.stride == 1 else f" ; t{i} = {window.stride}"
        split[name] = window
        edge_bytes[name] = (window.edge_rows() + abs(more)) * math.prod(shape) // max(size, 1) * item_bytes
    return SpatialDims(" ".join(inputs), " ".join(outputs), sizes, split, edge_bytes)


def windows_of(call: Call, count: int, kernel: Sequence[int]) -> tuple[Window, ...]:
    """The windows of a convolution or pooling over `count` dims from its arguments."""
    names = {argument.name for argument in call.target._schema.arguments}
    stride = call.argument("stride") or kernel
    padding = call.argument("padding")
    dilation = call.argument("dilation") if "dilation" in names else (1,)
    values = [per_dim(value, count) for value in (kernel, stride, padding, dilation)]
    return tuple(Window(kernel=k, stride=s, padding=p, dilation=d) for k, s, p, d in zip(*values, strict=True))


def per_dim(value: Sequence[int], count: int) -> tuple[int, ...]:
    """One number for every dim, or one per dim."""
    return tuple(value) if len(value) == count else (value[0],) * count

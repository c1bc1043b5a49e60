"""Which groups of operators our kernels compute at once, as data: the patterns of a forward group and of its backward.

Values of a forward group that only its own backward group reads are computed there again, so both are replaced together
or not at all. Names are those of `graph_patterns`; `kernel_rewrites` says what each group becomes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.passes.kernels.graph_patterns import GraphPattern, pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPattern:
    """forward: its lines, the last of which is what the group is found by; backward: lines found behind the forward
    values `anchors` (name of the line -> name of the value that it reads); optional lines may be missing."""

    name: str
    kind: str
    """As plans name the kernels that compute such groups."""
    forward: GraphPattern
    backward: GraphPattern
    anchors: Mapping[str, str]
    kept: Sequence[str]
    """Values that others may read: results of the kernel, or what stays beside it."""
    optional: Sequence[str] = field(default=())
    of_backward: bool = False
    """Whether backward holds the group; it has none of its own."""

    @property
    def root(self) -> str:
        """The last line of the forward group."""
        return list(self.forward.lines)[-1]


RMS_NORM = tuple(
    KernelPattern(
        name=name,
        kind="rms_norm",
        forward=pattern(f"""
            wide = cast(x)
            rstd = rsqrt(add(mean(pow(wide, 2), [-1], True), eps))
            normed = cast(mul({row}, rstd))
            out = mul(normed, weight)
        """),
        backward=pattern(f"""
            inner = cast(mul(grad, weight))
            slope = sum(mul(inner, {row}), last, True)
            shift = div(view(mul(mul(slope, -0.5), pow(rstd, 3))), width)
            grad_x = add(plus(cast(mul(inner, rstd)), other), cast(mul(shift, mul(wide, 2.0))))
            grad_weight = sum(mul(grad, normed), rows, True)
        """),
        anchors={"grad_x": "rstd", "grad_weight": "normed"},
        kept=("out", "rstd", "grad_x", "grad_weight"),
        optional=("grad_weight",),
    )
    for name, row in (("rms_norm", "wide"), ("rms_norm of a narrow row", "x"))
)
"""As Llama has it, which widens the row, and as T5, which widens it for its mean alone and lets the product with rstd
widen it again: then each part of the gradient of the row is rounded before they are added."""

GATED = tuple(
    KernelPattern(
        name=f"gated {activation}",
        kind="gated",
        forward=pattern(f"""
            active = {forward}
            out = mul(active, up)
        """),
        backward=pattern(f"""
            grad_gate = {backward}
            grad_up = mul(grad, active)
        """),
        anchors={"grad_up": "active", "grad_gate": "grad"},
        kept=("out", "grad_gate", "grad_up"),
    )
    for activation, forward, backward in (
        ("silu", "silu(gate)", "silu_backward(mul(grad, up), gate)"),
        ("gelu", "gelu(gate)", "gelu_backward(mul(grad, up), gate)"),
        ("gelu_tanh", "gelu(gate, approximate='tanh')", "gelu_backward(mul(grad, up), gate, approximate='tanh')"),
    )
)

GELU_TANH = KernelPattern(
    name="gelu by hand",
    kind="gelu",
    forward=pattern("""
        half = mul(x, 0.5)
        bent = tanh(mul(add(x, mul(pow(x, 3.0), 0.044715)), 0.7978845608028654))
        raised = add(bent, 1.0)
        out = mul(half, raised)
    """),
    backward=pattern("""
        straight = mul(tanh_backward(mul(grad, half), bent), 0.7978845608028654)
        cubic = mul(mul(straight, 0.044715), mul(pow(x, 2.0), 3.0))
        grad_x = total(straight, cubic, mul(mul(grad, raised), 0.5))
    """),
    anchors={"grad_x": "raised"},
    kept=("out", "grad_x"),
)
"""What Hugging Face writes out as `gelu_new`; torch has it as one operator, forward and backward."""

CROSS_ENTROPY = KernelPattern(
    name="cross-entropy",
    kind="cross_entropy",
    forward=pattern("""
        wide = wider(logits)
        maximum = amax(wide, [1], True)
        top = reduced(maximum, "max")
        centred = sub(wide, top)
        partial = sum(exp(centred), [1], True)
        log_total = log(reduced(partial, "sum"))
        chances = cast(sub(centred, log_total))
        out = lookup(chances, target, start)
    """),
    backward=pattern("""
        onehot = cast(mul(scattered, scale))
        grad_logits = sub(onehot, mul(exp(cast(chances)), reduced(sum(onehot, [1], True), "sum")))
    """),
    anchors={"grad_logits": "chances"},
    kept=("maximum", "top", "partial", "log_total", "out", "grad_logits"),
)
"""`scattered` is -1 at the target of each row, so the sum over its row is minus the scale: backward needs no sum.
Narrow logits that nobody widens have narrow chances, which backward widens again."""

ROPE = tuple(
    KernelPattern(
        name=f"rope{suffix}",
        kind="rope",
        forward=pattern(lines),
        backward=pattern(""),
        anchors={},
        kept=("out",),
        of_backward=bool(suffix),
    )
    for suffix, lines in (
        (
            "",
            """
            second = select(view(x), axis, 1)
            turned = cat([view(neg(second)), view(select(view(x), axis, 0))], axis)
            out = add(mul(x, cos), mul(view(turned), sin))
            """,
        ),
        (
            "_backward",
            """
            bent = mul(x, sin)
            second = select(view(bent), axis, 1)
            turned = cat([view(second), view(neg(select(view(bent), axis, 0)))], axis)
            out = add(mul(x, cos), view(turned))
            """,
        ),
    )
)
"""A rotary position embedding by halves of a head, as Hugging Face writes it; it is linear, so that its backward needs
nothing of forward and is a group of its own."""

PATTERNS: tuple[KernelPattern, ...] = (*RMS_NORM, *GATED, GELU_TANH, *ROPE, CROSS_ENTROPY)

"""Our attention operator against the kernels that torch's scaled_dot_product_attention chooses from, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.cost_models.operator_sizes import AttentionSizes, flops_of
from autopar.hardware.devices import Device
from benchmarks.gpu.kernels import check_close
from benchmarks.gpu.pricing import attention_seconds, priced_device
from benchmarks.gpu.stage import Place, Row, attempted
from benchmarks.gpu.timing import median_seconds

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "formula": SDPBackend.MATH,
}
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Attention of `heads` heads of queries over `groups` of keys."""

    batch: int
    heads: int
    groups: int
    length: int
    head: int
    causal: bool
    dropout: float

    @property
    def name(self) -> str:
        """For a row."""
        shared = f"/{self.groups}" if self.groups < self.heads else ""
        return f"{self.batch}x{self.heads}{shared}x{self.length}x{self.head}{' causal' if self.causal else ''}" + (
            f" dropout {self.dropout}" if self.dropout else ""
        )

    def sizes(self, backward: bool) -> AttentionSizes:
        """As the cost model takes them."""
        return AttentionSizes(
            batch=self.batch, heads=self.heads, queries_per_key=self.heads / self.groups, queries=self.length,
            keys=self.length, qk_dim=self.head, v_dim=self.head, causal=self.causal, backward=backward,
        )  # fmt: skip

    def tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """query, key, value, gradient of the output."""
        torch.manual_seed(0)
        return tuple(
            torch.randn(self.batch, heads, self.length, self.head, device=device, dtype=DTYPE)
            for heads in (self.heads, self.groups, self.groups, self.heads)
        )


def run(place: Place, shapes: Sequence[tuple[int, int, int, int, int, bool, float]]) -> Iterator[Row]:
    """shapes: batch, heads of queries, heads of keys, length, head size, whether causal, dropout."""
    device = priced_device(place)
    for numbers in shapes:
        shape = Shape(**dict(zip(Shape.__slots__, numbers, strict=True)))  # type: ignore[arg-type]
        yield attempted(f"forward {shape.name}", partial(forward, place, shape, device))
        yield attempted(f"backward {shape.name}", partial(backward, place, shape, device))


def ours(shape: Shape, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) as compiled programs compute them."""
    found: tuple[Tensor, Tensor] = torch.ops.autopar.attention(
        query, key, value, None, shape.dropout, shape.causal, None, 0
    )
    return found


def torchs(shape: Shape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As torch computes it, by the kernel that is allowed."""
    return functional.scaled_dot_product_attention(
        query, key, value, dropout_p=shape.dropout, is_causal=shape.causal, enable_gqa=shape.groups < shape.heads
    )


def forward(place: Place, shape: Shape, device: Device) -> Row:
    """One row; raises where results differ."""
    query, key, value, _ = shape.tensors(place.device)
    with torch.no_grad():
        check(shape, [ours(shape, query, key, value)[0]], [torchs(shape, query, key, value)])
        seconds = median_seconds(lambda: ours(shape, query, key, value), place.device)
        others, refused = by_backend(lambda: median_seconds(lambda: torchs(shape, query, key, value), place.device))
    return figures(shape, False, seconds, others, refused, device)


def backward(place: Place, shape: Shape, device: Device) -> Row:
    """One row; torch's seconds have autograd's in them."""
    query, key, value, grad = shape.tensors(place.device)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out, logsumexp = ours(shape, query, key, value)
    call = partial(
        torch.ops.autopar.attention_backward, grad, query, key, value, None, out, logsumexp, shape.dropout,
        shape.causal, None, 0,
    )  # fmt: skip

    def torch_seconds() -> float:
        result = torchs(shape, *leaves)
        return median_seconds(lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True), place.device)

    check(shape, call(), torch.autograd.grad(torchs(shape, *leaves), leaves, grad))
    others, refused = by_backend(torch_seconds)
    return figures(shape, True, median_seconds(call, place.device), others, refused, device)


def check(shape: Shape, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Raises where ours is not torch's. What is dropped differs: there the kernel stands beside its own reference
    (`kernels.py`)."""
    if not shape.dropout:
        check_close(found, wanted)


def by_backend(measure: Callable[[], float]) -> tuple[dict[str, float], dict[str, str]]:
    """(seconds by kernel of torch, why the others are not there)."""
    seconds, refused = {}, {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                seconds[name] = measure()
        except RuntimeError as error:
            refused[name] = str(error).splitlines()[0]
    return seconds, refused


def figures(
    shape: Shape, is_backward: bool, seconds: float, others: dict[str, float], refused: dict[str, str], device: Device
) -> Row:
    """FLOPs are those without a mask."""
    sizes = shape.sizes(is_backward)
    predicted = attention_seconds(sizes, "bfloat16", device)
    best = min(others, key=lambda name: others[name])
    return {
        "seconds": seconds,
        "torch_seconds": others,
        "refused": refused,
        "best_of_torch": best,
        "speed_of_best": others[best] / seconds,
        "flops_per_second": float(flops_of(sizes)) / seconds,
        "predicted_seconds": predicted,
        "predicted_of_measured": predicted / seconds,
    }

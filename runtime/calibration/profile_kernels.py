"""Measure kernels of this device for an `OperatorProfile`: products, attention, and what memory bounds.

    profile = profile_of_gpu(on_progress=print)     # about 300 kernels, under five minutes on one GPU
    save_profile(profile, operator_profile_path(profile.device))

A list of cases (`cases`) is data: sizes, and how to call the kernel. Who times them is an argument, so the list runs on
any device, and a test runs it on the CPU with a clock of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import machine_name
from autopar.hardware.operator_profile import KernelKind, MeasuredKernel, OperatorProfile

Timer = Callable[[Callable[[], object]], float]
"""Seconds of one call, launches overlapped as in a full queue."""

HIDDEN = (1024, 2048, 4096, 8192)
ROWS = (64, 512, 2048, 8192, 16384)
DTYPES = (torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 128)
SEQUENCES = (512, 2048, 8192)
ATTENTION_TOKENS = 16384
"""Tokens of every attention case: batch is this over the sequence."""
MEMORY_ROWS = (256, 4096, 32768)
MEMORY_WIDTHS = (1024, 4096, 8192)
REPEATS, WARM_UPS, PASSES = 10, 3, 3
LARGEST_FLOPS = 3e13
"""Products above it take tens of milliseconds and say nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel: what it is to the cost models, and how to make its call on a device (making allocates operands)."""

    kernel: MeasuredKernel
    make: Callable[[torch.device], Callable[[], object]]


def cases(
    *,
    hidden: Sequence[int] = HIDDEN,
    rows: Sequence[int] = ROWS,
    sequences: Sequence[int] = SEQUENCES,
    memory_rows: Sequence[int] = MEMORY_ROWS,
    memory_widths: Sequence[int] = MEMORY_WIDTHS,
    attention_tokens: int = ATTENTION_TOKENS,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Iterator[Case]:
    """All cases, in a fixed order."""
    for dtype in dtypes:
        for m in rows:
            for width in hidden:
                for k, n in ((width, width), (width, 4 * width), (4 * width, width)):
                    if 2.0 * m * k * n <= LARGEST_FLOPS:
                        yield from _products(m, k, n, dtype)
        for sequence in sequences:
            for head_dim in HEAD_DIMS:
                yield from _attention(max(1, attention_tokens // sequence), sequence, head_dim, dtype)
        for count in memory_rows:
            for width in memory_widths:
                yield from _memory(count, width, dtype)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unmeasured(kind: KernelKind, dtype: torch.dtype, sizes: tuple[float, ...], **options: object) -> MeasuredKernel:
    return MeasuredKernel(kind=kind, dtype=_named(dtype), sizes=sizes, seconds=1.0, **options)  # type: ignore[arg-type]


def _products(m: int, k: int, n: int, dtype: torch.dtype) -> Iterator[Case]:
    """Forward x W^T, input gradient g W, weight gradient g^T x of a linear layer of m tokens."""

    def forward(device: torch.device) -> Callable[[], object]:
        x, weight = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        return lambda: x @ weight.t()

    def input_gradient(device: torch.device) -> Callable[[], object]:
        g, weight = torch.randn(m, n, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        return lambda: g @ weight

    def weight_gradient(device: torch.device) -> Callable[[], object]:
        g, x = torch.randn(m, n, device=device, dtype=dtype), torch.randn(m, k, device=device, dtype=dtype)
        return lambda: g.t() @ x

    yield Case(kernel=_unmeasured("gemm", dtype, (m, n, k, 1), layout="TN"), make=forward)
    yield Case(kernel=_unmeasured("gemm", dtype, (m, k, n, 1), layout="NN"), make=input_gradient)
    yield Case(kernel=_unmeasured("gemm", dtype, (n, k, m, 1), layout="NT"), make=weight_gradient)


def _attention(batch: int, sequence: int, head_dim: int, dtype: torch.dtype) -> Iterator[Case]:
    heads = 2048 // head_dim
    sizes = (batch, heads, sequence, sequence, head_dim, head_dim)

    def operand(device: torch.device, gradients: bool) -> Tensor:
        return torch.randn(batch, heads, sequence, head_dim, device=device, dtype=dtype, requires_grad=gradients)

    def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward(device: torch.device) -> Callable[[], object]:
        return partial(attended, *(operand(device, False) for _ in range(3)))

    def backward(device: torch.device) -> Callable[[], object]:
        given = [operand(device, True) for _ in range(3)]
        out = attended(*given)
        return partial(torch.autograd.grad, out, given, torch.ones_like(out), retain_graph=True)

    yield Case(kernel=_unmeasured("attention forward", dtype, sizes, causal=True), make=forward)
    yield Case(kernel=_unmeasured("attention backward", dtype, sizes, causal=True), make=backward)


def _memory(rows: int, width: int, dtype: torch.dtype) -> Iterator[Case]:
    nbytes = float(rows * width * dtype.itemsize)

    def added(device: torch.device) -> Callable[[], object]:
        a, b = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
        return lambda: a + b

    def normed(device: torch.device) -> Callable[[], object]:
        x, weight = torch.randn(rows, width, device=device, dtype=dtype), torch.ones(width, device=device, dtype=dtype)
        return lambda: functional.layer_norm(x, (width,), weight, weight)

    def softmaxed(device: torch.device) -> Callable[[], object]:
        x = torch.randn(rows, width, device=device, dtype=dtype)
        return lambda: torch.softmax(x, -1)

    yield Case(kernel=_unmeasured("elementwise", dtype, (3 * nbytes, width)), make=added)
    yield Case(kernel=_unmeasured("norm", dtype, (2 * nbytes, width)), make=normed)
    yield Case(kernel=_unmeasured("softmax", dtype, (2 * nbytes, width)), make=softmaxed)


def measured(
    case_list: Sequence[Case], device: torch.device, timer: Timer, on_progress: Callable[[int, int], None]
) -> tuple[MeasuredKernel, ...]:
    """The kernels of the cases with their seconds. on_progress(done, of) is called after each."""
    found = []
    for done, case in enumerate(case_list, start=1):
        seconds = timer(case.make(device))
        kernel = case.kernel
        found.append(
            MeasuredKernel(
                kind=kernel.kind, dtype=kernel.dtype, sizes=kernel.sizes, seconds=seconds,
                layout=kernel.layout, causal=kernel.causal,
            )
        )  # fmt: skip
        on_progress(done, len(case_list))
    return tuple(found)


def seconds_on_cuda(call: Callable[[], object]) -> float:
    """Median over passes of the mean seconds of calls that were all queued before the first one ended."""
    for _ in range(WARM_UPS):
        call()
    passes: list[float] = []
    for _ in range(PASSES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(REPEATS):
            call()
        end.record()
        end.synchronize()
        passes.append(begin.elapsed_time(end) * 1e-3 / REPEATS)
    return statistics.median(passes)


def profile_of_gpu(on_progress: Callable[[int, int], None]) -> OperatorProfile:
    """Measure the current GPU. Raises ConfigurationError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigurationError("no CUDA device is visible: kernels are profiled on a GPU")
    kernels = measured(list(cases()), torch.device("cuda"), seconds_on_cuda, on_progress)
    return OperatorProfile(
        name=machine_name(),
        device=torch.cuda.get_device_properties().name,
        versions={"torch": str(torch.__version__), "cuda": str(torch.version.cuda)},
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        kernels=kernels,
    )

"""Triton kernels compiled for sm_80, sm_90 and sm_100 without a GPU: python -m benchmarks.kernels [--write]

Every kernel, at the sizes of large models and in fp32 and bf16: registers and shared memory of a program, the bytes of
a thread's stack (what does not fit the registers is spilled there), and the warps that run it, as the compiler's own
`cuobjdump` reports them for the finished cubin. What they take on a GPU: the stage "kernels" of `benchmarks.gpu`.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.ops.cross_entropy import cross_entropy_rows_reference
from autopar.ops.indexed_attention import indexed_attention_reference
from autopar.ops.linear_cross_entropy import linear_cross_entropy_reference
from autopar.ops.norms import LARGEST_ROW, add_layer_norm_reference, rms_norm_reference
from autopar.ops.packing import pack_reference
from autopar.ops.random_index import full_runs
from autopar.ops.saved_forms import flat_runs, pack_bits_reference, round_groups_reference
from benchmarks.results import write_results

RESULTS = Path(__file__).parent / "results" / "kernels.json"
CAPABILITIES = (80, 90, 100)
DTYPES = ("fp32", "bf16")
VOCABULARY = 32064
HEAD = 64
"""Elements of a head."""
PIECES = 8
"""Into which rows are packed: a collective of so many ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """A kernel with what Triton must know of its arguments: constants, and what is not of the case's dtype."""

    name: str
    module: str
    kernel: str
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    types: Mapping[str, str]
    """Triton types of arguments; those without are pointers to elements of the dtype."""
    multiples: tuple[str, ...] = ()
    """Numbers that are multiples of 16, as strides mostly are."""
    dtypes: tuple[str, ...] = DTYPES
    least_capability: int = 80
    """The first for which it compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a compiled kernel takes. stack_bytes: of a thread, 0 where nothing is spilled."""

    kernel: str
    dtype: str
    capability: int
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int


def compilations() -> Iterator[Compilation]:
    """Every kernel at the largest sizes that it takes, norms also at that of a small model."""
    norms = _module("norms")
    statistics = dict.fromkeys(("mean", "rstd", "weight_parts", "bias_parts"), "*fp32")
    sizes = {"eps": "fp32", "rows": "i32", "columns": "i32", "elements": "i32", "start": "i32"}
    for block in (1024, LARGEST_ROW):
        for centred in (False, True):
            name = f"{'layer' if centred else 'rms'} norm of {block}"
            flags = {"CENTRED": centred, "BLOCK": block}
            yield Compilation(
                name=name,
                module="norms",
                kernel="norm_kernel",
                constants={"HAS_RESIDUAL": True, **flags},
                num_warps=norms.warps_for(block, norms.FORWARD_ELEMENTS),
                types=statistics | sizes,
            )
            yield Compilation(
                name=f"{name} backward",
                module="norms",
                kernel="norm_backward_kernel",
                constants={"HAS_ADDED": True, "STAGES": norms.STAGES, **flags},
                num_warps=norms.backward_warps(block)[0],
                types=statistics | sizes,
            )
    for number, activation in enumerate(("silu", "gelu", "gelu_tanh")):
        for kernel in ("gated_kernel", "gated_backward_kernel"):
            constants = {"ACTIVATION": number, "BLOCK": 1024}
            yield Compilation(
                name=f"{activation} {kernel.removesuffix('_kernel')}",
                module="gated",
                kernel=kernel,
                constants=constants,
                types=sizes,
            )
    per_row = dict.fromkeys(("maximum", "total", "picked", "top", "log_total", "scale"), "*fp32") | {"target": "*i64"}
    width = {"STRIDE": VOCABULARY, "WIDTH": VOCABULARY}
    for kernel, constants in (
        ("rows_kernel", {"LANES": 512, "DEEP": 8, "FILLED": True, "FINISHED": True, **width}),
        (
            "backward_kernel",
            {"TILES": math.ceil(VOCABULARY / 4096), "COLUMNS": VOCABULARY, "BLOCK": 4096, **width},
        ),
    ):
        yield Compilation(
            name=f"cross-entropy {kernel.removesuffix('_kernel')}",
            module="cross_entropy",
            kernel=kernel,
            constants=constants,
            num_warps=8,
            types=per_row | sizes,
        )
    cut = {"OUTER": 4096, "POSITION": 1, "PIECES": 8, "RUN": 512, "SPAN": 4096, "BLOCK": 1024}
    for kernel in ("pack_kernel", "unpack_kernel"):
        name = kernel.removesuffix("_kernel")
        yield Compilation(name=name, module="packing", kernel=kernel, constants=cut, types=sizes)

    yield from _saved_forms()
    yield from _rope()
    yield _merging()
    yield from _grouped()
    yield from _attention()
    float8 = {"out": "*fp8e4nv", "scales": "*fp32", "largest": "*fp32"}
    float8 |= dict.fromkeys(("row_stride", "column_stride"), "i32")
    for kernel in ("rows_kernel", "largest_kernel", "tensor_kernel"):
        yield Compilation(
            name=f"float8 {kernel.removesuffix('_kernel')}",
            module="float8",
            kernel=kernel,
            constants={"ROWS": 1, "COLUMNS": 4096} | ({"WHOLE": True} if kernel == "rows_kernel" else {}),
            num_warps=_module("float8").warps_of(1, 4096),
            types=float8 | sizes,
            least_capability=89,
        )


def _saved_forms() -> Iterator[Compilation]:
    """Rounding to every number of bits where rows begin at multiples of 4, to 4 where they do not; and bits."""
    forms = _module("saved_forms")
    numbers = {"codes": "*u8", "ranges": "*fp32", "seed": "*i64", "salt": "i64", "kept": "*u8", "count": "i32"}
    numbers |= dict.fromkeys(("first", "row_stride", "columns", "groups", "bytes_"), "i32")
    for bits, aligned in ((8, True), (4, True), (2, True), (4, False)):
        constants = {"BITS": bits, "ALIGNED": aligned, "GROUPS": forms.GROUPS}
        yield Compilation(
            name=f"round to {bits} bits{'' if aligned else ', unaligned'}", module="saved_forms", kernel="round_kernel",
            constants=constants, num_warps=8, types=numbers,
        )  # fmt: skip
    yield Compilation(
        name="unround 4 bits", module="saved_forms", kernel="unround_kernel",
        constants={"BITS": 4, "BLOCK": forms.BLOCK}, num_warps=8, types=numbers,
    )  # fmt: skip
    for kernel, types, warps in (("pack_kernel", {"out": "*u8"}, 4), ("unpack_kernel", {}, 8)):
        yield Compilation(
            name=f"{kernel.removesuffix('_kernel')} bits", module="saved_forms", kernel=kernel,
            constants={"BLOCK": forms.BLOCK}, num_warps=warps, types=numbers | types,
        )  # fmt: skip


def _rope() -> Iterator[Compilation]:
    """As many heads of 128 as a program takes."""
    strides = {f"{of}_{dim}": "i32" for of in ("x", "out") for dim in ("batch", "head", "row")}
    numbers = dict.fromkeys(("heads", "length", "pairs", "table_batch"), "i32")
    for name, backward, interleaved in (
        ("rope", False, False), ("rope backward", True, False), ("rope interleaved", False, True),
    ):  # fmt: skip
        yield Compilation(
            name=name,
            module="rope",
            kernel="rope_kernel",
            constants={
                "INTERLEAVED": interleaved, "BACKWARD": backward, "HEADS": _module("rope").PAIRS // 64, "BLOCK": 64,
                "x_element": 1, "out_element": 1,
            },
            types=strides | numbers,
        )  # fmt: skip


def _merging() -> Compilation:
    """As many rows of 128 as a program takes."""
    pointers = dict.fromkeys(("sums", "other_sums", "result_sums"), "*fp32")
    strides = {f"{of}_{dim}": "i32" for of in ("out", "other", "result") for dim in ("batch", "head", "row")}
    return Compilation(
        name="merging",
        module="merging",
        kernel="merge_kernel",
        constants={
            "ROWS": _module("merging").ELEMENTS // 128, "BLOCK": 128, "out_element": 1, "other_element": 1,
            "result_element": 1,
        },
        types=pointers | strides | dict.fromkeys(("heads", "length", "width"), "i32"),
    )  # fmt: skip


def _grouped() -> Iterator[Compilation]:
    """Products of the rows of 128 experts."""
    grouped = _module("grouped")
    sizes = dict.fromkeys(("length", "inner", "columns", "groups", "height"), "i32") | {"counts": "*i64"}
    strides = {"row_stride": "i32", "matrix_group": "i64", "matrix_inner": "i32", "left_row": "i32", "right_row": "i32"}
    last = {
        "product_kernel": {"GROUPS": 256, "inner_stride": 1, "matrix_column": 1},
        "outer_kernel": {"GROUPS": 128, "left_column": 1, "right_column": 1},
    }
    for kernel, constants in last.items():
        for dtype, element_bytes in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
            rows, columns, inner, warps = grouped.TILES[element_bytes]
            tile = {"ROWS": rows, "COLUMNS": columns, "INNER": inner}
            yield Compilation(
                name=f"grouped {kernel.removesuffix('_kernel')}",
                module="grouped",
                kernel=kernel,
                constants=constants | tile | {"PRECISION": "ieee" if dtype == "fp32" else "tf32"},
                num_warps=warps,
                types=sizes | strides,
                dtypes=(dtype,),
            )


def _attention() -> Iterator[Compilation]:
    """Attention of heads of 64, 128 and 256 with everything that it can be asked for, and with dropout alone."""
    attention = _module("attention")
    pointers = {"row_index": "*i64", "key_index": "*i64", "starts": "*i64", "seed": "*i64", "logsumexp": "*fp32",
                "delta": "*fp32", "grad_mask": "*fp32"}  # fmt: skip
    numbers = dict.fromkeys(("heads", "groups", "inner", "queries", "keys", "salt"), "i32")
    numbers |= {f"{of}_{dim}": "i64" for of in ("mask", "grad") for dim in ("outer", "inner", "head", "row", "column")}
    strides = tuple(f"{of}_{to}" for of in ("query", "key", "value", "of_grad") for to in ("batch", "head"))
    numbers |= dict.fromkeys(strides, "i32")
    numbers |= {"width": "i64", "threshold": "i64", "scale": "fp32", "kept_scale": "fp32"}
    cases = [(width, dtype, 1) for width in (64, 128, 256) for dtype in ("bf16", "fp32")]
    for width, dtype, mask in [*cases, (64, "bf16", 0), (128, "bf16", 0)]:
        constants = {
            "WIDTH": width, "VALUES": width, "BLOCK": width, "BLOCK_VALUES": width, "CAUSAL": True,
            "WINDOW": 1024 if mask else 0, "MASK": mask, "DROP": True, "ALIGNED": True,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        }  # fmt: skip
        head = torch.empty(width, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
        tiles = attention.tiles_of(head, head, head if mask else None)
        for kernel, tile in zip(("forward_kernel", "rows_kernel", "keys_kernel"), tiles, strict=True):
            rows, keys, warps, stages, registers = tile
            sizes = {"ROWS": rows, "KEYS": keys} | dict.fromkeys(("QUERY_ROW", "KEY_ROW", "VALUE_ROW"), 12 * width)
            sizes |= {} if kernel == "forward_kernel" else {"OF_GRAD_ROW": 12 * width}
            sizes |= {"OUT_ROW": 12 * width, "WITH_MASK": mask > 0} if kernel == "rows_kernel" else {}
            yield Compilation(
                name=f"attention of {width} {kernel.removesuffix('_kernel')}{'' if mask else ' without a mask'}",
                module="attention",
                kernel=kernel,
                constants=constants | sizes,
                num_warps=warps,
                num_stages=stages,
                maxnreg=registers,
                types=pointers | numbers,
                multiples=strides,
                dtypes=(dtype,),
            )


def compiled(case: Compilation, dtype: str, capability: int) -> Resources:
    """Compile for a device that need not be there, pointers aligned as torch's are. Raises ImportError without it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(_module(case.module), case.kernel)
    signature = {
        name: "constexpr" if name in case.constants else case.types.get(name, f"*{dtype}") for name in kernel.arg_names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, of) in enumerate(signature.items())
        if of[0] == "*" or name in case.multiples
    }
    source = ASTSource(kernel, signature, dict(case.constants), aligned)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.maxnreg}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack, shared = _usage(done.asm["cubin"])
    return Resources(
        kernel=case.name,
        dtype=dtype,
        capability=capability,
        num_warps=case.num_warps,
        registers=registers,
        stack_bytes=stack,
        shared_bytes=shared,
    )


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """(registers, bytes of stack, bytes of shared memory) by `cuobjdump`, which Triton brings along."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", text))
    return int(found["REG"]), int(found["STACK"]), int(found["SHARED"])


def _module(name: str) -> Any:
    """A module of kernels, which imports Triton."""
    return import_module(f"autopar.runtime.kernels.triton_{name}")


def calls(rows: int, width: int, device: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(operator, arguments in bf16) of every kernel that moves `rows` rows of `width`."""
    x, residual, grad = (torch.randn(rows, width, device=device).bfloat16() for _ in range(3))
    weight, bias = (torch.randn(width, device=device).bfloat16() for _ in range(2))
    _, rstd = rms_norm_reference(x, weight, 1e-6)
    _, total, mean, deviation = add_layer_norm_reference(x, residual, weight, bias, 1e-5)
    yield "rms_norm", (x, weight, 1e-6)
    yield "add_rms_norm", (x, residual, weight, 1e-6)
    yield "rms_norm_backward", (grad, x, weight, rstd, residual)
    yield "layer_norm", (x, weight, bias, 1e-5)
    yield "add_layer_norm", (x, residual, weight, bias, 1e-5)
    yield "layer_norm_backward", (grad, total, weight, mean, deviation, residual)
    yield "gated", (x, residual, "silu")
    yield "gated_backward", (grad, x, residual, "silu")
    target = torch.randint(0, width, (rows,), device=device)
    maximum, sums, _ = cross_entropy_rows_reference(x, target, 0)
    yield "cross_entropy", (x, target)
    yield "cross_entropy_rows", (x, target, 0)
    yield "cross_entropy_backward", (x, target, maximum, sums.log(), torch.ones(rows, device=device), 0)
    yield from head_calls(x.view(1, rows, -1, HEAD if width % HEAD == 0 else width).transpose(1, 2))
    yield "quantised_rows", (x,)
    yield "quantised_tensor", (x,)
    padded = math.ceil(width / PIECES) * PIECES
    yield "dropout_rows", (x, 0.1, torch.tensor(1 << 40, device=device), 9, 0, width, rows)
    yield "pack", (x, 1, 1, PIECES, padded)
    yield "unpack", (pack_reference(x, 1, 1, PIECES, padded), 1, 1, PIECES, padded, width)
    rounded = (x, 4, torch.tensor(1 << 40, device=device), 9, [rows, width], flat_runs(full_runs((rows, width))))
    yield "round_groups", rounded
    yield "unround_groups", (round_groups_reference(*rounded), 4, [rows, width], x.dtype)
    yield "pack_bits", (x,)
    yield "unpack_bits", (pack_bits_reference(x), [rows, width], x.dtype)


def head_calls(x: Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The same of heads x (1, H, S, D)."""
    angles = torch.randn(1, *x.shape[2:], device=x.device)
    for name in ("rope", "rope_backward"):
        yield name, (x, angles.cos().bfloat16(), angles.sin().bfloat16(), False)
    sums, others = (torch.randn(x.shape[:-1], device=x.device) for _ in range(2))
    yield "merge_blocks", (x, sums, x.flip(2), others)


def loss_calls(rows: int, words: int, width: int, device: str) -> Iterator[tuple[str, tuple[Any, ...], int]]:
    """(operator, arguments in bf16, operations of its products) of a loss over `words` words in chunks of rows."""
    hidden, weight = (torch.randn(size, width, device=device).bfloat16() for size in (rows, words))
    target = torch.randint(0, words, (rows,), device=device)
    maximum, total, _ = linear_cross_entropy_reference(hidden, weight, target, 0)
    product = 2 * rows * words * width
    yield "linear_cross_entropy", (hidden, weight, target, 0), product
    rest = (maximum, total.log(), torch.ones(rows, device=device), 0)
    yield "linear_cross_entropy_backward", (hidden, weight, target, *rest), 3 * product


def grouped_calls(
    rows: int, groups: int, inner: int, columns: int, device: str
) -> Iterator[tuple[str, tuple[Any, ...], int]]:
    """The same of products of rows in runs of chance lengths, forward and the gradient of the matrices."""
    x, grad = (torch.randn(rows, size, device=device).bfloat16() for size in (inner, columns))
    matrices = torch.randn(groups, inner, columns, device=device).bfloat16()
    counts = torch.bincount(torch.randint(groups, (rows,)), minlength=groups).to(device)
    operations = 2 * rows * inner * columns
    yield "grouped_product", (x, matrices, counts), operations
    yield "grouped_outer", (x, grad, counts), operations


def attention_calls(
    batch: int, heads: int, length: int, head: int, device: str
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The same of causal attention with dropout, whose references write the scores out."""
    query, key, value, grad = (torch.randn(batch, heads, length, head, device=device).bfloat16() for _ in range(4))
    index, seed = torch.arange(length, device=device), torch.tensor(1 << 40, device=device)
    starts = torch.arange(batch * heads, device=device) * length**2
    rest = (1, True, head**-0.5, index, index, 0.1, seed, 9, starts, length, length % 4 == 0)
    yield "indexed_attention", (query, key, value, None, *rest)
    out, sums = indexed_attention_reference(query, key, value, None, *rest)
    yield "indexed_attention_backward", (grad, query, key, value, None, out, sums, *rest, False)


def main(arguments: list[str]) -> None:
    """Print, and with --write store, what every kernel takes."""
    import triton

    found = [compiled(case, dtype, at) for case in compilations() for dtype in case.dtypes for at in CAPABILITIES
             if at >= case.least_capability]  # fmt: skip
    for one in found:
        print(
            f"{one.kernel:32} {one.dtype} sm_{one.capability}: {one.registers:3} registers, {one.num_warps:2} warps, "
            f"{one.stack_bytes} bytes of stack, {one.shared_bytes} of shared memory"
        )
    content: dict[str, Any] = {"triton": triton.__version__, "compiled": [asdict(one) for one in found]}
    if "--write" in arguments:
        write_results(RESULTS, content)


if __name__ == "__main__":
    main(sys.argv[1:])

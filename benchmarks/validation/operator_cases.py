"""Rows of published operator measurements as values: which kernel, of which sizes, on which machine.

Each file has its own spelling; a case has none. `case_of` reads inputs only:

    {"gpu": "a100", "op": "attn_pre_proj", "num_tokens": "4096", "tp": "2", "hidden": "4096", ...}
    -> Gemm(m=4096, n=6144, k=4096) in float16 on the machine "A100-80"

vidur: attn_pre_proj is the product with the q, k and v weights, mlp_up_proj gate and up at once, mlp_act vLLM's
silu_and_mul, emb torch's index_select; times are those of the kernels, rounded to 1 us. NeuSight's columns K and N are
the outer and the inner dim (kernel names `_tn` and tile counts agree with that reading only). SimuMax times a loop of
asynchronous calls on the host, so that a short kernel takes what its dispatch takes; LLMCompass waits for each call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopar.cost_models.operators_memory import lookup_row
from autopar.errors import ConfigurationError
from autopar.hardware.devices import find_node, find_node_of_gpu
from benchmarks.validation.schemas import Schema

Row: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """`batch` products (m x k) @ (k x n); grouped: one kernel each, or one for all where `fused`."""

    m: int
    n: int
    k: int
    batch: int = 1
    element_bytes: int = 2
    output_bytes: int = 2
    accumulate: bool = False
    grouped: bool = False
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A kernel that memory bounds: a family, the bytes it moves, the elements of one row."""

    family: str
    nbytes: float
    row: int = 0
    element_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Fused causal attention, forward or backward."""

    batch: int
    heads: int
    key_heads: int
    seq: int
    qk_dim: int
    v_dim: int
    backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement: kernels that run one after the other, and how seconds become the measured value."""

    device: str
    """Name of a device preset."""
    machine: str
    """Whose fitted constants count in tier t1 (`device_curves`)."""
    dtype: str
    parts: tuple[tuple[float, Gemm | Memory | Attention], ...]
    """(how often, kernel)."""
    op: str
    host: str = ""
    """How the host's time counts: "" not at all, "floor" (asynchronous calls) or "added" (waits for each call)."""
    flops: float = 0.0
    """Of a value that is a rate: FLOPs, or elements."""
    divisor: float = 1.0
    resolution_seconds: float = 0.0
    """The measuring tool counts in multiples of this; 0: finer than matters."""


def case_of(row: Row, schema: Schema) -> Case:
    """The case of a row. Raises ConfigurationError where the kernel or the GPU is unknown."""
    readers = {
        "op_vidur_linear": _vidur,
        "op_neusight_kernels": _neusight,
        "op_simumax": _simumax,
        "op_llmcompass": _llmcompass,
        "op_deepgemm_h800_fp8": _deepgemm,
        "op_galvatron_llama2_7b_fwd": _galvatron,
    }
    if schema.name not in readers:
        raise ConfigurationError(f"no operators are read from a file of kind {schema.name}")
    return readers[schema.name](row)


def device_name(gpu: str) -> str:
    """The preset of a GPU by any of its names. Raises ConfigurationError for an unknown one."""
    plain = gpu.replace("PCIe", "PCIE").replace("_", " ").strip()
    try:
        return find_node(plain.removeprefix("NVIDIA ").removeprefix("Tesla ").removeprefix("AMD Instinct ")).device
    except ConfigurationError:
        return find_node_of_gpu(gpu.replace("_", " ")).device


def _int(row: Row, column: str) -> int:
    return int(float(row[column]))


def _vidur(row: Row) -> Case:
    tokens, hidden, ffn, tp = (_int(row, c) for c in ("num_tokens", "hidden", "ffn", "tp"))
    head = hidden // _int(row, "heads")
    queries = hidden // tp
    keys = max(1, _int(row, "kv_heads") // tp) * head
    gated = row["gated_mlp"].lower() in ("true", "1")
    inner = ffn // tp
    kernels: dict[str, Gemm | Memory] = {
        "attn_pre_proj": Gemm(m=tokens, n=queries + 2 * keys, k=hidden),
        "attn_post_proj": Gemm(m=tokens, n=hidden, k=queries),
        "mlp_up_proj": Gemm(m=tokens, n=inner * (2 if gated else 1), k=hidden),
        "mlp_down_proj": Gemm(m=tokens, n=hidden, k=inner),
        "mlp_act": Memory(family="gated", nbytes=(3 if gated else 2) * tokens * inner * 2, row=inner),
        "attn_rope": Memory(family="rotary", nbytes=2 * tokens * (queries + keys) * 2, row=queries + keys),
        "add": Memory(family="elementwise", nbytes=3 * tokens * hidden * 2),
        "emb": _lookup(tokens, hidden),
    }
    norm = Memory(family="norm", nbytes=2 * tokens * hidden * 2, row=hidden)
    kernel = norm if row["op"].endswith("layernorm") else kernels.get(row["op"])
    if kernel is None:
        raise ConfigurationError(f"operator {row['op']!r} is unknown")
    device = device_name(row["gpu"])
    return Case(device=device, machine=device, dtype="float16", parts=((1, kernel),), op=row["op"], divisor=1e-3,
                resolution_seconds=1e-6)  # fmt: skip


def _lookup(rows: int, width: int, element_bytes: int = 2) -> Memory:
    return Memory(family="lookup", nbytes=2 * rows * width * element_bytes, row=int(lookup_row(rows, width)))


_ONE_OPERAND = ("addu", "mulu", "divu", "powu", "relu", "gelu", "tanh", "silu", "sigmoid", "exp", "sqrt")


def _neusight(row: Row) -> Case:
    op = row["op"]
    if op in ("linear", "bmm"):
        batch = _int(row, "B")
        kernel: Gemm | Memory = Gemm(m=_int(row, "M"), n=_int(row, "K"), k=_int(row, "N"), batch=batch,
                                     element_bytes=4, output_bytes=4)  # fmt: skip
    else:
        rows, width = _int(row, "B"), _int(row, "H")
        family = {"softmax": "softmax", "ln": "norm"}.get(op, "elementwise")
        passes = 2 if family != "elementwise" or op in _ONE_OPERAND else 3
        kernel = Memory(family=family, nbytes=passes * rows * width * 4, row=0 if family == "elementwise" else width,
                        element_bytes=4)  # fmt: skip
    device = device_name(row["gpu"])
    return Case(device=device, machine=device, dtype="float32", parts=((1, kernel),), op=op, divisor=1e-3)


def _simumax(row: Row) -> Case:
    fields = dict(re.findall(r"(\w+)=([\w.]+)", row["shape"]))
    device = device_name(row["gpu"].removesuffix("-SXM") if row["gpu"].startswith("B200") else row["gpu"])
    kernel, flops = _simumax_kernel(row["op"], fields)
    peak = float(row["peak_tflops_ref"]) * 1e12
    dtype = "float8_e4m3fn" if row["op"].startswith("fp8") else "bfloat16"
    if dtype != "bfloat16" and isinstance(kernel, Gemm):
        raise ConfigurationError("no FP8 product of SimuMax is known")
    op = f"{row['op']} {fields.get('layout') or fields.get('stage', '')}".strip()
    return Case(device=device, machine=device, dtype=dtype, parts=((1, kernel),), op=op, host="floor",
                flops=flops / peak)  # fmt: skip


def _simumax_kernel(op: str, fields: Mapping[str, str]) -> tuple[Gemm | Attention, float]:
    if op.startswith("sdp"):
        batch, seq, heads, keys, qk, v = (
            int(fields[f]) for f in ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
        )
        backward = op.endswith("bwd")
        flops = (5 if backward else 2) * batch * seq**2 * heads * (qk + v)
        return Attention(
            batch=batch, heads=heads, key_heads=keys, seq=seq, qk_dim=qk, v_dim=v, backward=backward
        ), flops
    if op == "group_matmul":
        groups, m, n, k = (int(fields[f]) for f in ("ng", "M", "N", "K"))
        weight_gradient = fields["stage"] == "bwd_grad_w"
        if weight_gradient:
            rows, columns, inner = n, k, m
        elif fields["stage"] == "bwd_grad_act":
            rows, columns, inner = m, k, n
        else:
            rows, columns, inner = m, n, k
        wide = weight_gradient and fields["main_grad_dtype"] == "fp32"
        gemm = Gemm(m=rows, n=columns, k=inner, batch=groups, output_bytes=4 if wide else 2,
                    accumulate=fields["accumulate"] == "True",
                    grouped=True)  # fmt: skip
        return gemm, 2.0 * groups * m * n * k
    if op == "matmul":
        b, m, n, k = (int(fields[f]) for f in "bmnk")
        gemm = Gemm(m=m, n=n, k=k, batch=b, output_bytes=4 if fields["out_dtype"] == "fp32" else 2,
                    accumulate=fields["accumulate"] == "True")  # fmt: skip
        return gemm, 2.0 * b * m * n * k
    raise ConfigurationError(f"operator {op!r} is unknown")


def _llmcompass(row: Row) -> Case:
    op, device = row["op"], device_name(row["gpu"])
    case = Case(
        device=device, machine=f"{device} of LLMCompass", dtype="float16", parts=(), op=op, host="added"
    )  # fmt: skip
    if op.startswith("matmul"):
        m, n, k = _int(row, "M"), _int(row, "N"), _int(row, "K")
        return replace(case, parts=((1, Gemm(m=m, n=n, k=k)),), divisor=1e-3)
    rows = _int(row, "M")
    width = _int(row, "N") if row["N"] else 1
    family = {"softmax": "softmax", "layernorm": "norm", "gelu": "elementwise"}.get(op)
    if family is None:
        raise ConfigurationError(f"operator {op!r} is unknown")
    kernel = Memory(family=family, nbytes=2 * rows * width * 2, row=width if family != "elementwise" else 0)
    return replace(case, parts=((1, kernel),), flops=rows * width / 1e9)


def _deepgemm(row: Row) -> Case:
    groups, m, n, k = (_int(row, c) for c in ("groups", "M", "N", "K"))
    grouped = not row["kind"].startswith("dense")
    gemm = Gemm(m=m, n=n, k=k, batch=groups, element_bytes=1, output_bytes=2, grouped=grouped, fused=grouped)
    return Case(device="H800-SXM", machine="H800-SXM", dtype="float8_e4m3fn", parts=((1, gemm),), op=row["kind"],
                flops=2.0 * groups * m * n * k)  # fmt: skip


_HIDDEN, _FFN, _HEADS, _VOCABULARY = 4096, 11008, 32, 32000
"""Llama 2 7B."""


def _galvatron(row: Row) -> Case:
    batch, seq = _int(row, "batch"), _int(row, "seq")
    layer, ends = _llama_layer(batch, seq), _llama_ends(batch, seq)
    if row["kind"] == "model_fwd_ms":
        layers = _int(row, "layers")
        parts = (*((layers * count, kernel) for count, kernel in layer), *ends)
        scale = 1e-3
    elif row["kind"] == "per_layer_per_sample_fwd_ms_derived":
        parts, scale = (layer if row["layer_type"] == "0" else ends), 1e-3 * batch
    else:
        raise ConfigurationError(f"measurement {row['kind']!r} is unknown")
    return Case(device="A100-80", machine="A100-80", dtype="bfloat16", parts=parts, op=row["kind"], divisor=scale)


def _llama_layer(batch: int, seq: int) -> tuple[tuple[float, Gemm | Memory | Attention], ...]:
    tokens = batch * seq
    wide = tokens * _HIDDEN * 2
    norm = Memory(family="norm", nbytes=2 * wide, row=_HIDDEN)
    attention = Attention(batch=batch, heads=_HEADS, key_heads=_HEADS, seq=seq, qk_dim=128, v_dim=128, backward=False)
    return (
        (2, norm),
        (1, Gemm(m=tokens, n=3 * _HIDDEN, k=_HIDDEN)),
        (1, Memory(family="rotary", nbytes=4 * wide, row=2 * _HIDDEN)),
        (1, attention),
        (1, Gemm(m=tokens, n=_HIDDEN, k=_HIDDEN)),
        (1, Gemm(m=tokens, n=2 * _FFN, k=_HIDDEN)),
        (1, Memory(family="gated", nbytes=3 * tokens * _FFN * 2, row=_FFN)),
        (1, Gemm(m=tokens, n=_HIDDEN, k=_FFN)),
        (2, Memory(family="elementwise", nbytes=3 * wide)),
    )


def _llama_ends(batch: int, seq: int) -> tuple[tuple[float, Gemm | Memory | Attention], ...]:
    """Embedding, last norm, head, and a cross entropy over fp32 logits: cast, log-softmax, lookup."""
    tokens = batch * seq
    logits = tokens * _VOCABULARY
    return (
        (1, _lookup(tokens, _HIDDEN)),
        (1, Memory(family="norm", nbytes=2 * tokens * _HIDDEN * 2, row=_HIDDEN)),
        (1, Gemm(m=tokens, n=_VOCABULARY, k=_HIDDEN)),
        (1, Memory(family="elementwise", nbytes=(2 + 4) * logits)),
        (1, Memory(family="softmax", nbytes=(4 + 4) * logits, row=_VOCABULARY, element_bytes=4)),
    )

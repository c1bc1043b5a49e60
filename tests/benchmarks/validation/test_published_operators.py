import numpy as np
import pytest

from benchmarks.validation.operator_cases import Attention, Gemm, Memory, case_of, device_name
from benchmarks.validation.operators import measured_seconds, naive, predict
from benchmarks.validation.schemas import SCHEMAS, Schema

SCHEMA = {schema.name: schema for schema in SCHEMAS}
VIDUR = {"gpu": "a100", "model": "meta-llama/Llama-2-7b-hf", "tp": "1", "hidden": "4096", "ffn": "11008",
         "heads": "32", "kv_heads": "32", "vocab": "32768", "gated_mlp": "True"}  # fmt: skip

NN = "b=1, m=4096, k=24576, n=1536, layout=NN, accumulate=False, out_dtype=bf16"
GROUPED = (
    "ng=40, M=616, N=3072, K=5120, dtype=bf16, out_dtype=bf16, main_grad_dtype=fp32, stage=fwd, grad=False, "
    "accumulate=False, use_split_accumulator=False, single_output=True"
)

ROWS: list[tuple[str, dict[str, str], float]] = [
    ("op_vidur_linear", {**VIDUR, "op": "attn_pre_proj", "num_tokens": "4096"}, 1.911),
    ("op_vidur_linear", {**VIDUR, "op": "mlp_down_proj", "num_tokens": "4096"}, 1.604),
    ("op_vidur_linear", {**VIDUR, "op": "mlp_act", "num_tokens": "4096"}, 0.266),
    ("op_vidur_linear", {**VIDUR, "op": "emb", "num_tokens": "4096"}, 0.234),
    ("op_vidur_linear", {**VIDUR, "op": "add", "num_tokens": "1"}, 0.002),
    (
        "op_neusight_kernels",
        {"gpu": "NVIDIA A100 80GB PCIe", "op": "bmm", "B": "80", "M": "2048", "N": "2048", "K": "64", "H": ""},
        4.570,
    ),
    ("op_simumax", {"gpu": "A100-PCIe-80", "op": "matmul", "peak_tflops_ref": "312", "shape": NN}, 0.7378),
    ("op_simumax", {"gpu": "A100-PCIe-80", "op": "group_matmul", "peak_tflops_ref": "312", "shape": GROUPED}, 0.63134),
    (
        "op_llmcompass",
        {"gpu": "A100", "op": "matmul_fp16", "M": "8192", "K": "4096", "N": "4096", "unit": "ms"},
        1.0210,
    ),
    ("op_deepgemm_h800_fp8", {"kind": "dense_fp8", "groups": "1", "M": "4096", "N": "4096", "K": "7168"}, 1265.0),
    (
        "op_galvatron_llama2_7b_fwd",
        {"kind": "model_fwd_ms", "layers": "4", "layer_type": "", "batch": "4", "seq": "2048"},
        78.43,
    ),
]
"""(schema, inputs, value of the first measured column): rows of the published files."""


def value(schema: Schema, row: dict[str, str], tier: str) -> float:
    (predicted,) = naive([row], schema) if tier == "naive" else predict([row], schema, tier)  # type: ignore[arg-type]
    assert not predicted.reason
    return float(predicted.values[next(iter(schema.measured["op"]))])


@pytest.mark.parametrize(("name", "row", "measured"), ROWS)
def test_a_published_row_is_predicted_within_twenty_percent(name: str, row: dict[str, str], measured: float) -> None:
    assert value(SCHEMA[name], row, "t1") == pytest.approx(measured, rel=0.2)


def test_fitted_constants_beat_shared_ones_and_both_beat_physics_and_the_naive_roofline() -> None:
    error = {
        tier: np.median([abs(np.log(value(SCHEMA[name], row, tier) / measured)) for name, row, measured in ROWS])
        for tier in ("t1", "t0", "physics", "naive")
    }
    assert error["t1"] <= error["t0"] < error["physics"] < error["naive"]


def test_the_columns_of_neusight_name_the_inner_dim_n() -> None:
    case = case_of(ROWS[5][1], SCHEMA["op_neusight_kernels"])
    ((_, kernel),) = case.parts
    assert kernel == Gemm(m=2048, n=64, k=2048, batch=80, element_bytes=4, output_bytes=4)


def test_a_weight_gradient_of_experts_adds_to_fp32() -> None:
    shape = (
        ROWS[7][1]["shape"].replace("stage=fwd", "stage=bwd_grad_w").replace("accumulate=False", "accumulate=True", 1)
    )
    ((_, kernel),) = case_of({**ROWS[7][1], "shape": shape}, SCHEMA["op_simumax"]).parts
    assert isinstance(kernel, Gemm)
    assert (kernel.m, kernel.n, kernel.k, kernel.output_bytes, kernel.accumulate) == (3072, 5120, 616, 4, True)


def test_operators_with_grouped_queries_and_few_tokens_are_read() -> None:
    grouped = {**VIDUR, "kv_heads": "8", "tp": "16", "op": "attn_pre_proj", "num_tokens": "1"}
    ((_, product),) = case_of(grouped, SCHEMA["op_vidur_linear"]).parts
    assert product == Gemm(m=1, n=256 + 2 * 128, k=4096)  # at least one head of keys and values
    ((_, lookup),) = case_of({**VIDUR, "op": "emb", "num_tokens": "8"}, SCHEMA["op_vidur_linear"]).parts
    assert lookup == Memory(family="lookup", nbytes=2 * 8 * 4096 * 2, row=8 * 4096)
    sdp = "batch=1, seq_len=4096, head_num=32, kv_head_num=8, qk_head_dim=192, v_head_dim=128, qkv_contiguous=True"
    row = {"gpu": "B200-SXM", "op": "sdp_bwd", "peak_tflops_ref": "2250.0", "shape": sdp}
    ((_, attention),) = case_of(row, SCHEMA["op_simumax"]).parts
    assert attention == Attention(batch=1, heads=32, key_heads=8, seq=4096, qk_dim=192, v_dim=128, backward=True)


def test_a_measured_value_and_its_seconds_agree() -> None:
    for name, row, measured in ROWS:
        schema = SCHEMA[name]
        column = next(iter(schema.measured["op"]))
        seconds = measured_seconds({**row, column: str(measured)}, case_of(row, schema), schema)
        assert 1e-6 < seconds < 0.1


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("a100", "A100-80"),
        ("h100", "H100-SXM"),
        ("a40", "A40"),
        ("Tesla V100-PCIE-32GB", "V100-PCIE"),
        ("Tesla P4", "P4"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("AMD_Instinct_MI210", "MI210"),
        ("AMD_Instinct_MI100", "MI100"),
        ("B200-SXM", "B200-SXM"),
        ("A100-PCIe-80", "A100-PCIE-80"),
        ("NVIDIA_A100_80GB_PCIe", "A100-PCIE-80"),
        ("H200-SXM", "H200-SXM"),
        ("MI300X", "MI300X"),
        ("RTX4090", "RTX4090"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA L40", "L40"),
    ],
)
def test_gpus_are_known_by_every_name_that_files_use(gpu: str, device: str) -> None:
    assert device_name(gpu) == device


def test_an_unknown_kernel_or_gpu_has_a_reason() -> None:
    unknown, foreign = predict(
        [{**ROWS[0][1], "op": "made_up"}, {**ROWS[0][1], "gpu": "abacus"}], SCHEMA["op_vidur_linear"], "t0"
    )
    assert "made_up" in unknown.reason
    assert "abacus" in foreign.reason
    assert not unknown.values

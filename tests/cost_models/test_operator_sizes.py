import numpy as np
import pytest

from autopar.cost_models.operator_sizes import (
    AttentionSizes,
    Parts,
    ProductSizes,
    RowSizes,
    flops_of,
    sizes_of,
    whole,
)


def test_the_parts_of_a_product_say_which_dims_are_split() -> None:
    # one axis of 4 on m, on n, on k; two axes on m and k
    parts = Parts(
        operands=(np.array([0.25, 1, 0.25, 0.125]), np.array([1, 0.25, 0.25, 0.5])),
        result=np.array([0.25, 0.25, 1, 0.25]),
        work=np.array([0.25, 0.25, 0.25, 0.125]),
    )
    sizes = sizes_of("mm", [(4096, 2048), (2048, 3072)], (4096, 3072), parts)
    assert isinstance(sizes, ProductSizes)
    assert list(np.asarray(sizes.m)) == [1024, 4096, 4096, 1024]
    assert list(np.asarray(sizes.n)) == [3072, 768, 3072, 3072]
    assert list(np.asarray(sizes.k)) == [2048, 2048, 512, 1024]


def test_a_batch_of_products_may_be_split_by_its_batch() -> None:
    parts = Parts(operands=(0.125, 0.125), result=0.125, work=0.125)
    sizes = sizes_of("bmm", [(64, 512, 128), (64, 128, 512)], (64, 512, 512), parts)
    assert isinstance(sizes, ProductSizes)
    assert (sizes.batch, sizes.m, sizes.n, sizes.k) == (8, 512, 512, 128)


def test_experts_are_products_of_their_share_of_the_rows() -> None:
    shapes = [(4096, 1024), (64, 1024, 2048), (4096,)]
    sizes = sizes_of("expert_linear", shapes, (4096, 2048), whole(3))
    assert isinstance(sizes, ProductSizes)
    assert (sizes.m, sizes.n, sizes.k, sizes.batch, sizes.grouped) == (64, 2048, 1024, 64, True)
    by_expert = sizes_of("expert_linear", shapes, (4096, 2048), Parts(operands=(1, 0.25, 1), result=1, work=0.25))
    assert isinstance(by_expert, ProductSizes)
    assert (by_expert.m, by_expert.batch) == (64, 16)


def test_attention_is_split_by_heads_or_by_queries() -> None:
    query, key = (2, 32, 4096, 128), (2, 8, 4096, 128)
    heads = Parts(operands=(0.25, 0.25, 0.25), result=0.25, work=0.25)
    split = sizes_of("attention", [query, key, key], query, heads, causal=True)
    assert isinstance(split, AttentionSizes)
    assert (split.batch * split.heads, split.queries, split.queries_per_key, split.causal) == (16, 4096, 4, True)
    grouped_too = sizes_of("attention", [query, key, key], query, Parts(operands=(1 / 16, 1 / 8, 1 / 8), work=1 / 16))
    assert isinstance(grouped_too, AttentionSizes)
    assert (grouped_too.batch * grouped_too.heads, grouped_too.queries) == (8, 2048)
    sequence = sizes_of("attention", [query, query, query], query, Parts(operands=(0.25, 1, 1), result=0.25, work=0.25))
    assert isinstance(sequence, AttentionSizes)
    assert (sequence.heads, sequence.queries) == (32, 1024)


@pytest.mark.parametrize("by_batch", [1 / 512, 1 / 2048, 1 / 64])
@pytest.mark.parametrize("by_sequence", [1, 1 / 8, 1 / 32])
def test_a_rank_has_its_part_of_the_queries_however_they_are_split(by_batch: float, by_sequence: float) -> None:
    query, key = (2048, 128, 8192, 128), (2048, 8, 8192, 128)
    parts = Parts(operands=(by_batch * by_sequence, by_batch, by_batch), work=by_batch * by_sequence)
    split = sizes_of("attention", [query, key, key], query, parts)
    assert isinstance(split, AttentionSizes)
    assert split.batch * split.heads * split.queries == pytest.approx(2048 * 128 * 8192 * by_batch * by_sequence)


@pytest.mark.parametrize(("name", "family"), [("native_layer_norm", "norm"), ("_softmax_backward_data", "softmax")])
def test_kernels_that_walk_over_rows_know_their_row(name: str, family: str) -> None:
    assert sizes_of(name, [(8, 512, 768)], (8, 512, 768), whole(1)) == RowSizes(family=family, row=768)


def test_an_operator_without_a_model_has_no_sizes() -> None:
    assert sizes_of("convolution", [(8, 3, 224, 224), (64, 3, 7, 7)], (8, 64, 112, 112), whole(2)) is None


@pytest.mark.parametrize(("backward", "products"), [(False, 64 + 32), (True, 3 * 64 + 2 * 32)])
def test_flops_of_attention_are_those_of_its_products(backward: bool, products: int) -> None:
    # forward: scores over 64 dims, values over 32; backward: scores again and their two gradients, values' two
    sizes = AttentionSizes(
        batch=2, heads=4, queries_per_key=1, queries=16, keys=8, qk_dim=64, v_dim=32, causal=False, backward=backward
    )
    assert float(flops_of(sizes)) == 2 * 4 * 16 * 8 * 2 * products

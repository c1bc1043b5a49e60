from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.errors import ConfigurationError
from autopar.rules.binding import bind_rule
from autopar.rules.call import Call, TensorSpec

aten = torch.ops.aten


def call(*operands: tuple[int, ...], to: tuple[int, ...] = ()) -> Call:
    specs = tuple(TensorSpec(shape, torch.float32) for shape in operands)
    return Call(aten.mm.default, specs, (), (TensorSpec(to, torch.float32),))


def test_contracted_names_leave_partial_sum() -> None:
    rule = bind_rule("m k, k n -> m n ; flops: 2*m*k*n", call((4, 6), (6, 8), to=(4, 8)))
    assert rule.inputs == ((("m",), ("k",)), (("k",), ("n",)))
    assert rule.reductions == {"k": ("sum",)}
    assert rule.flops == 2 * 4 * 6 * 8


def test_sizes_of_fused_dims_come_from_other_operands() -> None:
    rule = bind_rule("b (h g), b h -> b (h g)", call((2, 12), (2, 4), to=(2, 12)))
    assert rule.sizes == {"b": 2, "h": 4, "g": 3}
    assert rule.outputs == ((("b",), ("h", "g")),)


def test_names_of_size_one_vanish() -> None:
    rule = bind_rule("b (h g), b h -> b (h g)", call((1, 4), (1, 4), to=(1, 4)))
    assert rule.names == ("h",)
    assert rule.inputs[0] == ((), ("h",))


def test_ellipsis_broadcasts_from_the_right() -> None:
    rule = bind_rule("...* -> ...", call((4, 1, 3), (2, 3), to=(4, 2, 3)))
    assert rule.inputs == ((("d0",), (), ("d2",)), (("d1",), ("d2",)))


def test_whole_dims_are_no_choice() -> None:
    rule = bind_rule("b [n] -> b [n]", call((4, 6), to=(4, 6)))
    assert rule.names == ("b",)
    assert rule.inputs == ((("b",), (None,)),)


def test_optional_operands_may_be_missing() -> None:
    assert len(bind_rule("b n, n? -> b n", call((4, 6), to=(4, 6))).inputs) == 1
    assert len(bind_rule("b n, n? -> b n", call((4, 6), (6,), to=(4, 6))).inputs) == 2


def test_linear_patterns_apply_to_calls_with_as_many_operands() -> None:
    text = "...* -> ... ; linear: x | x s"
    assert bind_rule(text, call((4,), to=(4,))).linear == ((True,),)
    assert bind_rule(text, call((4,), (), to=(4,))).linear == ((True, False),)
    assert bind_rule(text, call((4,), (4,), to=(4,))).linear == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m k, k n -> m n", "is 6 and 5"),
        ("m k -> m n", "describes 1 tensors, the call has 2"),
        ("m k, (a b) n -> m n", "nothing says how large"),
        ("m k, k n, -> m n", "has not the dims that are described|describes"),
    ],
)
def test_errors_repeat_the_string_and_the_shapes(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        bind_rule(text, call((4, 6), (5, 8), to=(4, 8)))
    assert text in str(caught.value)
    assert "on [[4, 6], [5, 8]] -> [[4, 8]]: " in str(caught.value)


@pytest.mark.parametrize(
    "text", ["m k", "m k -> (m k", "M -> M", "m -> m ; k", "m -> m ; k: product", "... ... -> m", "(m+1 k) -> m"]
)
def test_strings_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="rule"):
        bind_rule(text, call((4, 6), to=(4, 6)))


def test_a_graph_node_has_no_part_in_a_call() -> None:
    hash(call((4, 6), to=(4, 6)))
    assert not any(isinstance(part, fx.Node) for part in call((4, 6), to=(4, 6)).args)


def test_edges_of_a_halo_are_counted_and_ask_for_one_range() -> None:
    rule = bind_rule("b (s [t]) -> b s ; s: by halo edges 4*b ; t = 2", call((3, 8), to=(3, 4)))
    assert rule.exchanged_bytes == {"s": 12}
    assert rule.needs_one_range("s")
    assert not rule.needs_one_range("b")
    assert rule.inputs[0][1] == ("s", None)


def test_a_dim_may_have_more_or_fewer_rows_than_its_name() -> None:
    rule = bind_rule("b s -> b s-2 ; s: by moved_rows", call((3, 8), to=(3, 6)))
    assert rule.sizes == {"b": 3, "s": 8}
    assert rule.outputs == ((("b",), ("s",)),)
    with pytest.raises(ConfigurationError, match="'s' is 6 and 5"):
        bind_rule("b s -> b s-2 ; s: by moved_rows", call((3, 8), to=(3, 5)))


def test_or_and_and_are_the_maximum_and_the_minimum_of_bools() -> None:
    assert bind_rule("m k -> m ; k: or", call((4, 6), to=(4,))).reductions == {"k": ("max",)}
    assert bind_rule("m k -> m ; k: and", call((4, 6), to=(4,))).reductions == {"k": ("min",)}


def call_of_operator(target: object, arguments: tuple[object, ...], to: tuple[int, ...]) -> Call:
    """A call on tensors given by their shapes and on attributes."""
    return Call(target, arguments, (), (TensorSpec(to, torch.float32),))


def test_an_argument_names_a_dim_that_is_something_else() -> None:
    x = TensorSpec((4, 6, 8), torch.float32)
    rule = bind_rule("r...{n} -> r...{n} ; at: dim ; n: by sharing bytes 8*...",
                     call_of_operator(aten._softmax.default, (x, -2, False), (4, 6, 8)))  # fmt: skip
    assert rule.inputs == ((("r0",), ("n",), ("r2",)),)
    assert rule.implementations == {"n": "sharing"}
    assert rule.synchronised_bytes == {"n": 8 * 4 * 8}


def test_arguments_name_dims_that_a_tensor_lacks() -> None:
    x = TensorSpec((4, 6, 8), torch.float32)
    call = call_of_operator(aten.diagonal.default, (x, 0, 0, 2), (6, 4))
    rule = bind_rule("a...{_} -> a...{} _ ; at: dim1 dim2", call)
    assert rule.inputs == (((None,), ("a1",), (None,)),)
    assert rule.outputs == ((("a1",), (None,)),)


def test_an_argument_is_a_size_and_all_remaining_dims_have_one_effect() -> None:
    x = TensorSpec((2, 12, 5), torch.float32)
    call = call_of_operator(aten.native_group_norm.default, (x, None, None, 2, 12, 5, 3, 1e-5), (2, 12, 5))
    rule = bind_rule("b (g c) ... -> b (g c) ... ; g = group ; ...: by sharing bytes 2*output", call)
    assert rule.sizes == {"b": 2, "g": 3, "c": 4, "d0": 5}
    assert rule.synchronised_bytes == {"d0": 2 * 4 * 2 * 12 * 5}


def test_braces_hold_one_dim() -> None:
    with pytest.raises(ConfigurationError, match="one dim in its braces"):
        bind_rule("a...{x y} -> ... ; at: dim", call((4, 6), to=(4, 6)))

"""Cases of softmax, cross-entropy, layer norm and RMS norm, along whole and along split dims."""

from __future__ import annotations

import torch

from autopar.ops.cross_entropy import cross_entropy_reference
from autopar.ops.norms import layer_norm_reference, rms_norm_reference
from tests.rules.case_values import Arguments, Case, bools, case, ids, x

aten = torch.ops.aten
ours = torch.ops.autopar


def _masked_scores(s: int) -> Arguments:
    """Scores whose first row sees nothing and whose other rows miss some columns."""
    kept = bools(4, s)
    kept[0], kept[1:, 0] = False, True
    return x(4, s).masked_fill(~kept, -torch.inf), -1


def _layer_norm_backward(s: int) -> Arguments:
    value, weight, bias = x(s, 3, 4), x(4), x(4)
    _, mean, rstd = aten.native_layer_norm.default(value, [4], weight, bias, 1e-5)
    return x(s, 3, 4), value, [4], mean, rstd, weight, bias, [True, True, True]


def _layer_norm_backward_of_two_dims(s: int) -> Arguments:
    value = x(3, s, 4)
    _, mean, rstd = aten.native_layer_norm.default(value, [s, 4], None, None, 1e-5)
    return x(3, s, 4), value, [s, 4], mean, rstd, None, None, [True, False, False]


def _rms_norm_backward(s: int) -> Arguments:
    value, weight = x(3, s), x(s)
    _, rstd = aten._fused_rms_norm.default(value, [s], weight, 1e-5)
    return x(3, s), value, [s], rstd, weight, [True, True]


def _our_rms_norm_backward(s: int) -> Arguments:
    value, weight = x(3, s), x(s)
    _, rstd = rms_norm_reference(value, weight, 1e-5)
    return x(3, s), value, weight, rstd, None


def _our_rms_norm_backward_with_more(s: int) -> Arguments:
    return *_our_rms_norm_backward(s)[:-1], x(3, s)


def _our_layer_norm_backward(s: int) -> Arguments:
    value, weight, bias = x(s, 3, 4), x(4), x(4)
    _, mean, rstd = layer_norm_reference(value, weight, bias, 1e-5)
    return x(s, 3, 4), value, weight, mean, rstd, None


def _our_layer_norm_backward_with_more(s: int) -> Arguments:
    return *_our_layer_norm_backward(s)[:-1], x(s, 3, 4)


def _cross_entropy_backward(s: int) -> Arguments:
    logits, target = x(6, s), ids(s, 6)
    _, top, log_total = cross_entropy_reference(logits, target)
    return logits, target, top, log_total, x(6), 0


def _linear_cross_entropy_backward(s: int) -> Arguments:
    hidden, weight, target = x(6, 5), x(s, 5), ids(s, 6)
    _, top, log_total = cross_entropy_reference(hidden @ weight.t(), target)
    return hidden, weight, target, top, log_total, x(6), 0


CASES: list[Case] = [
    case(aten._softmax.default, lambda s: (x(s, 4, 3), 1, False)),
    case(aten._softmax.default, lambda s: (x(3, s), -1, False), "row"),
    case(aten._log_softmax.default, lambda s: (x(s, 4, 3), -1, False)),
    case(aten._log_softmax.default, lambda s: (x(s, 4), 0, False), "first_dim"),
    case(aten._safe_softmax.default, _masked_scores),
    case(aten._softmax_backward_data.default, lambda s: (x(s, 4), x(s, 4), 1, torch.float64)),
    case(aten._softmax_backward_data.default, lambda s: (x(3, s), x(3, s), -1, torch.float64), "row"),
    case(aten._log_softmax_backward_data.default, lambda s: (x(s, 4), x(s, 4), 1, torch.float64)),
    case(aten._log_softmax_backward_data.default, lambda s: (x(3, s), -x(3, s).abs(), -1, torch.float64), "row"),
    case(aten.native_layer_norm.default, lambda s: (x(s, 3, 4), [4], x(4), x(4), 1e-5)),
    case(aten.native_layer_norm.default, lambda s: (x(4, 3, s) + 3, [3, s], None, None, 1e-5), "no_weight"),
    case(aten.native_layer_norm_backward.default, _layer_norm_backward),
    case(aten.native_layer_norm_backward.default, _layer_norm_backward_of_two_dims, "two_dims"),
    case(aten._fused_rms_norm.default, lambda s: (x(s, 3, 4), [4], x(4), 1e-5)),
    case(aten._fused_rms_norm.default, lambda s: (x(3, s), [s], None, None), "default_eps"),
    case(aten._fused_rms_norm_backward.default, _rms_norm_backward),
    case(ours.rms_norm.default, lambda s: (x(s, 3, 4), x(4), 1e-5)),
    case(ours.rms_norm.default, lambda s: (x(3, s), x(s), 1e-5), "row"),
    case(ours.rms_norm_backward.default, _our_rms_norm_backward),
    case(ours.rms_norm_backward.default, _our_rms_norm_backward_with_more, "with_more"),
    case(ours.layer_norm.default, lambda s: (x(s, 3, 4) + 3, x(4), x(4), 1e-5)),
    case(ours.layer_norm_backward.default, _our_layer_norm_backward),
    case(ours.layer_norm_backward.default, _our_layer_norm_backward_with_more, "with_more"),
    case(ours.cross_entropy.default, lambda s: (x(6, s), ids(s, 6))),
    case(ours.cross_entropy_backward.default, _cross_entropy_backward),
    case(ours.linear_cross_entropy.default, lambda s: (x(6, 5), x(s, 5), ids(s, 6), 0)),
    case(ours.linear_cross_entropy_backward.default, _linear_cross_entropy_backward),
]

"""How an operator of backward reads a value of forward: what must be kept of it, and what rounding does to gradients.

    threshold_backward(grad, y, 0)    sign      whether y is above 0, and nothing else: a bit a value
    mm(grad^T, x)                     linear    a rounded x whose mean is x gives gradients whose mean is exact
    gelu_backward(grad, x)            smooth    the mean is exact but for terms of the square of a step
    max_pool2d_backward(grad, x, i)   shape     values are not read
    anything else                     exact     losses, statistics of norms, choices

The same words are asked of captured graphs, to say what a plan may choose, and of lowered ones, to do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from torch import fx

from autopar.graphs.operator_names import base_name

Reading: TypeAlias = Literal["sign", "linear", "smooth", "shape", "exact"]

_BOTH: Mapping[int, Reading] = {0: "linear", 1: "linear"}
_SMOOTH: Mapping[int, Reading] = {1: "smooth"}
READINGS: Mapping[str, Mapping[int, Reading]] = {
    "threshold_backward": {1: "sign"},
    "leaky_relu_backward": {1: "sign"},
    "mm": _BOTH,
    "bmm": _BOTH,
    "mul": _BOTH,
    "_to_copy": {0: "linear"},
    "where": {1: "linear", 2: "linear"},
    "convolution_backward": {1: "linear"},
    "gelu_backward": _SMOOTH,
    "silu_backward": _SMOOTH,
    "tanh_backward": _SMOOTH,
    "sigmoid_backward": _SMOOTH,
    "softplus_backward": _SMOOTH,
    "mish_backward": _SMOOTH,
    "elu_backward": {5: "smooth"},
    "native_layer_norm_backward": _SMOOTH,
    "native_batch_norm_backward": _SMOOTH,
    "native_group_norm_backward": _SMOOTH,
    "_fused_rms_norm_backward": _SMOOTH,
    "layer_norm_backward": _SMOOTH,
    "rms_norm_backward": _SMOOTH,
    "gated_backward": {1: "smooth", 2: "smooth"},
    "_softmax_backward_data": _SMOOTH,
    "attention_backward": {1: "smooth", 2: "smooth", 3: "smooth", 5: "smooth"},
    "attention_backward_with_mask": {1: "smooth", 2: "smooth", 3: "smooth", 5: "smooth"},
    "max_pool2d_with_indices_backward": {1: "shape"},
}
"""Operator -> argument -> how it is read; what is not there is read exactly. Where a value is 0 or above it everywhere,
as behind ReLU, its sign is all that its backward asks for."""


def reading(node: fx.Node, position: int) -> Reading:
    """How a call reads its argument at `position`."""
    name = base_name(node.target)
    found = READINGS.get(name, {}).get(position, "exact")
    if found == "sign" and name == "threshold_backward" and node.args[2] != 0:
        return "exact"
    return found

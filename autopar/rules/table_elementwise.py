"""Rules of operators that compute every element from the elements at the same place: all dims may be split.

Those that torch tags as pointwise and that are not linear need no entry.
"""

from __future__ import annotations

from collections.abc import Mapping

ELEMENTWISE_RULES: Mapping[str, str] = {
    "aten.add.Tensor": "...* -> ... ; linear: x x",
    "aten.sub.Tensor": "...* -> ... ; linear: x x",
    "aten.neg": "... -> ... ; linear: x",
    "aten.clone": "... -> ... ; linear: x",
    "aten.mul": "...* -> ... ; linear: x | x s | s x",
    "aten.div.Tensor": "...* -> ... ; linear: x | x s",
    "aten.div.Scalar": "... -> ... ; linear: x",
    "aten._to_copy": "... -> ... ; linear: x",
    "aten.copy": "..., ... -> ...",
    "aten.softplus_backward": "..., ... -> ...",
    "aten.rsub.Tensor": "...* -> ... ; linear: x x",
    "aten.elu_backward": "..., ... -> ...",
    "aten.leaky_relu_backward": "..., ... -> ...",
    "aten.hardswish": "... -> ...",
    "aten.hardswish_backward": "..., ... -> ...",
    "aten.mish_backward": "..., ... -> ...",
    "aten.hardsigmoid_backward": "..., ... -> ...",
    "aten.hardtanh_backward": "..., ... -> ...",
    "aten.hardshrink_backward": "..., ... -> ...",
    "aten.softshrink_backward": "..., ... -> ...",
    "aten.log_sigmoid_backward": "..., ..., ... -> ...",
    "aten.rrelu_with_noise_backward": "..., ..., ... -> ...",
    "aten._prelu_kernel": "...* -> ...",
    "aten._prelu_kernel_backward": "...* -> ..., ...",
    "autopar.gated": "..., ... -> ...",
    "autopar.gated_backward": "..., ..., ... -> ..., ... ; linear: x - -",
    "aten.isin.Tensor_Tensor": "..., [...] -> ...",
    "aten.isin.Tensor_Scalar": "... -> ...",
    "aten.isin.Scalar_Tensor": "[...] ->",
    "aten.view.dtype": "... _ -> ... _",
    # complex numbers
    "aten.complex": "..., ... -> ... ; linear: x x",
    "aten.polar": "..., ... -> ...",
    "aten.view_as_complex": "... _ -> ... ; linear: x",
    "aten.view_as_real": "... -> ... _ ; linear: x",
    "aten._conj": "... -> ... ; linear: x",
    "aten._neg_view": "... -> ... ; linear: x",
    # quantised numbers in training
    "aten.fake_quantize_per_tensor_affine_cachemask": "... -> ..., ...",
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams": "..., [...], [...], [...] -> ..., ...",
    "aten.fake_quantize_per_channel_affine_cachemask": "..., [...], [...] -> ..., ... ; whole: axis",
}

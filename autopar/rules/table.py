"""The rules, one string per operator (the language is described in `language.py`).

A key is an operator with overload ("aten.sum.dim_IntList") or all overloads of one ("aten.mul"). Elementwise operators
that torch tags as pointwise need no entry (`POINTWISE`). Operators whose dims depend on attributes in a way that the
language cannot say have a function in `table_functions.py` that returns such a string.
"""

from __future__ import annotations

from collections.abc import Mapping

POINTWISE = "...* -> ...*"

_ELEMENTWISE: Mapping[str, str] = {
    "aten.add.Tensor": "...* -> ... ; linear: x x",
    "aten.sub.Tensor": "...* -> ... ; linear: x x",
    "aten.neg": "... -> ... ; linear: x",
    "aten.clone": "... -> ... ; linear: x",
    "aten.mul": "...* -> ... ; linear: x | x s | s x",
    "aten.div.Tensor": "...* -> ... ; linear: x | x s",
    "aten.div.Scalar": "... -> ... ; linear: x",
    "aten._to_copy": "... -> ... ; linear: x",
    "aten.copy": "..., ... -> ...",
    "aten.full_like": "... -> ...",
    "aten.zeros_like": "... -> ...",
    "aten.ones_like": "... -> ...",
    "aten.empty_like": "... -> ...",
    "aten.softplus_backward": "..., ... -> ...",
    "autopar.dropout_backward": "..., ... -> ...",
    "autopar.dropout": "... -> ..., ...",
}

_CONTRACTIONS: Mapping[str, str] = {
    "aten.mm": "m k, k n -> m n ; flops: 2*m*k*n",
    "aten.bmm": "b m k, b k n -> b m n ; flops: 2*b*m*k*n",
    "aten.mv": "m k, k -> m ; flops: 2*m*k",
    "aten.dot": "k, k -> ; flops: 2*k",
    "aten.vdot": "k, k -> ; flops: 2*k",
    "transformers.grouped_mm_fallback": "[t] k, [e] k n, [e] -> [t] n ; flops: 2*t*k*n",
    "transformers.grouped_mm_fallback_backward": ("[t] k, [e] k n, [e], [t] n -> [t] k, [e] k n ; flops: 4*t*k*n"),
}

_REDUCTIONS: Mapping[str, str] = {
    "aten.sum.dim_IntList": "... -> ... ; reduce: dim ; linear: x",
    "aten.sum.default": "... -> ... ; reduce: all ; linear: x",
    "aten.mean.dim": "... -> ... ; reduce: dim by local_mean ; linear: x",
    "aten.mean.default": "... -> ... ; reduce: all by local_mean ; linear: x",
    "aten.amax": "... -> ... ; reduce: dim max",
    "aten.amin": "... -> ... ; reduce: dim min",
    "aten.max.default": "... -> ... ; reduce: all max",
    "aten.min.default": "... -> ... ; reduce: all min",
    "aten.max.dim": "... -> ..., ... ; drop: dim",
    "aten.min.dim": "... -> ..., ... ; drop: dim",
    "aten.argmax": "... -> ... ; drop: dim",
    "aten.argmin": "... -> ... ; drop: dim",
    "aten.all.dim": "... -> ... ; drop: dim",
    "aten.any.dim": "... -> ... ; drop: dim",
    "aten.any.dims": "... -> ... ; drop: dim",
    "aten.all.dims": "... -> ... ; drop: dim",
    "aten.any.default": "[...] ->",
    "aten.all.default": "[...] ->",
    "aten.prod.dim_int": "... -> ... ; drop: dim",
    "aten.var.correction": "... -> ... ; drop: dim",
    "aten.var_mean.correction": "... -> ..., ... ; drop: dim",
    "aten.std.correction": "... -> ... ; drop: dim",
    "aten.logsumexp": "... -> ... ; drop: dim",
    "aten.linalg_vector_norm": "... -> ... ; drop: dim",
}

_ALONG_A_DIM: Mapping[str, str] = {
    "aten.cumsum": "... -> ... ; whole: dim ; linear: x",
    "aten.cumprod": "... -> ... ; whole: dim",
    "aten.logcumsumexp": "... -> ... ; whole: dim",
    "aten.topk": "... -> ..., ... ; whole: dim",
    "aten.sort": "... -> ..., ... ; whole: dim",
    "aten.argsort": "... -> ... ; whole: dim",
    "aten.flip": "... -> ... ; whole: dims ; linear: x",
    "aten.roll": "... -> ... ; whole: dims ; linear: x",
    "aten.glu": "... -> ... ; whole: dim",
    "aten.glu_backward": "..., ... -> ... ; whole: dim",
    "aten.cat": "...* -> ... ; whole: dim ; linear: all",
    "aten.slice.Tensor": "... -> ... ; whole: dim ; linear: x",
    "aten.slice_scatter": "..., ... -> ... ; whole: dim ; linear: all",
    "aten.select.int": "... -> ... ; drop: dim ; linear: x",
    "aten.split_with_sizes": "... -> ...* ; whole: dim ; linear: x",
    "aten.split.Tensor": "... -> ...* ; whole: dim ; linear: x",
    "aten.unbind": "... -> ...* ; drop: dim ; linear: x",
    "aten.tril": "... _ _ -> ... _ _ ; linear: x",
    "aten.triu": "... _ _ -> ... _ _ ; linear: x",
    "aten.bucketize.Tensor": "..., [...] -> ...",
    "aten.histc": "[...] -> [...]",
}

_LOOKUPS: Mapping[str, str] = {
    "aten.embedding": "v d, ... -> ... d ; v: sum by masked_embedding ; linear: x -",
}

_NORMS: Mapping[str, str] = {
    "aten.native_group_norm": "b (g [c]) [...], (g [c])?, (g [c])? -> b (g [c]) [...], b g, b g",
    "aten.native_group_norm_backward": (
        "b (g [c]) [...], b (g [c]) [...], b g, b g, (g [c])? -> b (g [c]) [...], (g [c]), (g [c])"
    ),
}

_POOLING: Mapping[str, str] = {
    "aten.max_pool2d_with_indices": "... _ _ -> ... _ _, ... _ _",
    "aten.max_pool2d_with_indices_backward": "... _ _, ... _ _, ... _ _ -> ... _ _",
    "aten.max_pool3d_with_indices": "... _ _ _ -> ... _ _ _, ... _ _ _",
    "aten.max_pool3d_with_indices_backward": "... _ _ _, ... _ _ _, ... _ _ _ -> ... _ _ _",
    "aten.avg_pool1d": "... _ -> ... _ ; linear: x",
    "aten.avg_pool2d": "... _ _ -> ... _ _ ; linear: x",
    "aten.avg_pool2d_backward": "... _ _, ... _ _ -> ... _ _ ; linear: x -",
    "aten.avg_pool3d": "... _ _ _ -> ... _ _ _ ; linear: x",
    "aten.avg_pool3d_backward": "... _ _ _, ... _ _ _ -> ... _ _ _ ; linear: x -",
    "aten._adaptive_avg_pool2d": "... _ _ -> ... _ _ ; linear: x",
    "aten._adaptive_avg_pool2d_backward": "... _ _, ... _ _ -> ... _ _ ; linear: x -",
    "aten._adaptive_avg_pool3d": "... _ _ _ -> ... _ _ _ ; linear: x",
    "aten._adaptive_avg_pool3d_backward": "... _ _ _, ... _ _ _ -> ... _ _ _ ; linear: x -",
    "aten.adaptive_max_pool2d": "... _ _ -> ... _ _, ... _ _",
    "aten.adaptive_max_pool2d_backward": "... _ _, ... _ _, ... _ _ -> ... _ _",
    "aten.upsample_nearest2d": "b c _ _ -> b c _ _ ; linear: x",
    "aten.upsample_nearest2d_backward": "b c _ _ -> b c _ _ ; linear: x",
    "aten.upsample_bilinear2d": "b c _ _ -> b c _ _ ; linear: x",
    "aten.upsample_bilinear2d_backward": "b c _ _ -> b c _ _ ; linear: x",
    "aten.reflection_pad2d": "... _ _ -> ... _ _ ; linear: x",
    "aten.reflection_pad2d_backward": "... _ _, ... _ _ -> ... _ _ ; linear: x -",
}

_FACTORIES: Mapping[str, str] = {
    "aten.full.default": "-> ...",
    "aten.zeros.default": "-> ...",
    "aten.ones.default": "-> ...",
    "aten.empty.memory_format": "-> ...",
    "aten.empty_permuted.default": "-> ...",
    "aten.scalar_tensor.default": "->",
    "aten.arange": "-> i ; i: by offset_arange",
    "aten.new_zeros": "[...] -> ...",
    "aten.new_ones": "[...] -> ...",
    "aten.new_full": "[...] -> ...",
    "aten.new_empty": "[...] -> ...",
}

RULES: Mapping[str, str] = {
    **_ELEMENTWISE,
    **_CONTRACTIONS,
    **_REDUCTIONS,
    **_ALONG_A_DIM,
    **_LOOKUPS,
    **_NORMS,
    **_POOLING,
    **_FACTORIES,
}

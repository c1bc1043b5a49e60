"""Rules of products, linear algebra (matrices stay whole, batches of them are split) and Fourier transforms.

bmm  -->  batch, rows, columns and the contracted dim;   svd([b, m, n])  -->  b
"""

from __future__ import annotations

from collections.abc import Mapping

_PRODUCTS: Mapping[str, str] = {
    "aten.mm": "m k, k n -> m n ; flops: 2*m*k*n",
    "autopar.mm_fp8_rowwise": "m k, k n -> m n ; flops: 2*m*k*n",
    "autopar.mm_fp8_tensorwise": "m k, k n -> m n ; flops: 2*m*k*n",
    "aten.bmm": "b m k, b k n -> b m n ; flops: 2*b*m*k*n",
    "aten.mv": "m k, k -> m ; flops: 2*m*k",
    "aten.dot": "k, k -> ; flops: 2*k",
    "aten.vdot": "k, k -> ; flops: 2*k",
    "transformers.grouped_mm_fallback": "[t] k, [e] k n, [e] -> [t] n ; flops: 2*t*k*n",
    "transformers.grouped_mm_fallback_backward": ("[t] k, [e] k n, [e], [t] n -> [t] k, [e] k n ; flops: 4*t*k*n"),
    "aten.trace": "_ _ -> ; linear: x",
    "aten._cdist_forward": "... m [d], ... n [d] -> ... m n",
    "aten._cdist_backward": "... m n, ... m [d], ... n [d], ... m n -> ... m [d]",
    "aten._pdist_forward": "[...] -> [...]",
    "aten._pdist_backward": "[...], [...], [...] -> [...]",
}

_LINEAR_ALGEBRA: Mapping[str, str] = {
    "aten.linalg_inv_ex": "... _ _ -> ... _ _, ...",
    "aten.linalg_cholesky_ex": "... _ _ -> ... _ _, ...",
    "aten.cholesky": "... _ _ -> ... _ _",
    "aten.cholesky_inverse": "... _ _ -> ... _ _",
    "aten.cholesky_solve": "... _ _, ... _ _ -> ... _ _",
    "aten.linalg_qr": "... _ _ -> ... _ _, ... _ _",
    "aten.geqrf": "... _ _ -> ... _ _, ... _",
    "aten.linalg_householder_product": "... _ _, ... _ -> ... _ _",
    "aten.ormqr": "... _ _, ... _, ... _ _ -> ... _ _",
    "aten._linalg_svd": "... _ _ -> ... _ _, ... _, ... _ _",
    "aten._linalg_eigh": "... _ _ -> ... _, ... _ _",
    "aten.linalg_eig": "... _ _ -> ... _, ... _ _",
    "aten._linalg_eigvals": "... _ _ -> ... _",
    "aten._linalg_det": "... _ _ -> ..., ... _ _, ... _",
    "aten._linalg_slogdet": "... _ _ -> ..., ..., ... _ _, ... _",
    "aten.linalg_matrix_exp": "... _ _ -> ... _ _",
    "aten.linalg_lu": "... _ _ -> ... _ _, ... _ _, ... _ _",
    "aten.linalg_lu_factor_ex": "... _ _ -> ... _ _, ... _, ...",
    "aten.linalg_lu_solve": "... _ _, ... _, ... _ _ -> ... _ _",
    "aten.lu_unpack": "... _ _, ... _ -> ... _ _, ... _ _, ... _ _",
    "aten.linalg_ldl_factor_ex": "... _ _ -> ... _ _, ... _, ...",
    "aten.linalg_ldl_solve": "... _ _, ... _, ... _ _ -> ... _ _",
    "aten.linalg_solve_triangular": "... _ _, ... _ _ -> ... _ _",
    "aten.triangular_solve": "... _ _, ... _ _ -> ... _ _, ... _ _",
    "aten.linalg_pinv.atol_rtol_tensor": "... _ _, [...]?, [...]? -> ... _ _",
    "aten.linalg_cross": "..., ... -> ... ; whole: dim",
}

_FOURIER: Mapping[str, str] = {
    "aten._fft_r2c": "... -> ... ; whole: dim ; linear: x",
    "aten._fft_c2r": "... -> ... ; whole: dim ; linear: x",
    "aten._fft_c2c": "... -> ... ; whole: dim ; linear: x",
}

MATRIX_RULES: Mapping[str, str] = {**_PRODUCTS, **_LINEAR_ALGEBRA, **_FOURIER}

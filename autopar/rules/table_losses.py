"""Rules of losses that stay whole operators: the batch is split; a sequence depends on all of its steps and classes."""

from __future__ import annotations

from collections.abc import Mapping

LOSS_RULES: Mapping[str, str] = {
    "autopar.ctc_loss": "[t] n [c], n [s], n, n -> n ; flops: 20*t*n*s",
    "autopar.ctc_loss_backward": "n, [t] n [c], n [s], n, n -> [t] n [c] ; flops: 60*t*n*s + 5*t*n*c",
}

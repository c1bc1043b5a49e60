"""Operators of our own (`torch.ops.autopar.*`) and the local computations that lowered graphs call by name.

In: tensors of one rank. Out: tensors. Captured graphs hold some in the place of torch's (`attention`, `dropout`,
`experts`, `recurrent`), so that a machine without a GPU can plan for one; passes write the others (`blocks`, `buckets`,
`masked`, `halo`, ...) around collectives. What `autopar.runtime.kernels` computes on CUDA has its reference here.
"""

from autopar.ops.attention_operator import (
    attention,
    attention_backward,
    attention_backward_by_index,
    attention_backward_with_mask,
    attention_backward_with_mask_by_index,
    attention_by_index,
)
from autopar.ops.capped_rows import capped_order
from autopar.ops.ctc import ctc_loss, ctc_loss_backward
from autopar.ops.dropout_operator import dropout, dropout_backward, dropout_by_index
from autopar.ops.experts import expert_linear, expert_outer
from autopar.ops.random import exponential, integers, normal, uniform
from autopar.ops.random_index import Runs, full_runs, keep_mask
from autopar.ops.recurrent import recurrent_layer, recurrent_layer_backward

__all__ = [
    "Runs",
    "attention",
    "attention_backward",
    "attention_backward_by_index",
    "attention_backward_with_mask",
    "attention_backward_with_mask_by_index",
    "attention_by_index",
    "capped_order",
    "ctc_loss",
    "ctc_loss_backward",
    "dropout",
    "dropout_backward",
    "dropout_by_index",
    "expert_linear",
    "expert_outer",
    "exponential",
    "full_runs",
    "integers",
    "keep_mask",
    "normal",
    "recurrent_layer",
    "recurrent_layer_backward",
    "uniform",
]

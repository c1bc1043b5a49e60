"""Kernels of users: an operator of `torch.library.triton_op` stays one operator, and a bare kernel is refused.

    @triton_op("mylib::scale", mutates_args=())     -->   mylib.scale.default(x) in the graph, for which
    def scale(x): wrap_triton(kernel)[grid](...)          `register_rule("mylib::scale", ...)` says how it splits

torch opens such operators while it traces, for a compiler that would fuse the kernel. A rule needs them whole, and
nothing says how a bare kernel, which reads and writes memory, may be split.
"""

from __future__ import annotations

from torch import fx

from autopar._compat import is_kernel_launch
from autopar.errors import CaptureError

ADVICE = (
    "wrap its launch in an operator of torch.library.triton_op (torch.library.custom_op for other kernels), with its "
    "gradient in register_autograd, and give the operator a rule with autopar.register_rule"
)


def refuse_bare_kernels(graph_module: fx.GraphModule) -> None:
    """Raises CaptureError where the graph launches a Triton kernel outside of an operator."""
    for node in graph_module.graph.nodes:
        if is_kernel_launch(node.target):
            raise CaptureError(f"forward launches a Triton kernel outside of an operator: {ADVICE}")

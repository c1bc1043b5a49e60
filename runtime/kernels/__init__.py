"""Kernels: how a graph is run (`backends`), and Triton kernels of our operators on CUDA.

A Triton kernel stands beside a torch reference in `autopar.ops` that computes the same; importing this package
registers it for CUDA tensors. Triton itself is imported at the first call, and only if it is installed.
"""

from autopar.runtime.kernels import on_cuda
from autopar.runtime.kernels.backends import GraphCall, kernels

__all__ = ["GraphCall", "kernels", "on_cuda"]

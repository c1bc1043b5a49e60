"""Registers the CUDA implementations of our operators: of each, the Triton kernel or the torch reference."""

from autopar.runtime.kernels.registry import KERNELS

KERNELS.register_on_cuda()

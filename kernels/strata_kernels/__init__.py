"""Kernels: numpy references, and the CUDA ones that are held to them."""

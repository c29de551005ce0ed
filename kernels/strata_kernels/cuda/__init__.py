"""CUDA sources, compiled by `strata_kernels.compiler`."""

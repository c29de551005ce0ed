"""The client on a GPU: kernels, memory as they find it, and the steps that run them."""

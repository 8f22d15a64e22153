"""Launches of the Triton kernels on torch tensors, and their registration as custom ops."""

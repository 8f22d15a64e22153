"""Faster implementations, by library: `KERNELS` of each subpackage maps an op to its kernels."""

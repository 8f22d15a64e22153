"""Launches of the Triton kernels on JAX arrays, through jax-triton."""

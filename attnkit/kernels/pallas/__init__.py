"""Pallas sources. Importing them needs jax; `attnkit.backends` does so when a kernel is launched."""

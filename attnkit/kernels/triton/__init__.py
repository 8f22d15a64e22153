"""Triton sources. Importing them needs triton; `attnkit.backends` does so when a kernel is launched."""

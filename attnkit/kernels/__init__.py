"""Kernel sources by language. Launch code and gradients are in `attnkit.backends`."""

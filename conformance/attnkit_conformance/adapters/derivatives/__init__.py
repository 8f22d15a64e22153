"""Derivatives beyond gradients, by the transformations of a library, of functions of named arrays."""

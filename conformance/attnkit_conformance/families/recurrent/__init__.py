"""Gated linear attention and the delta rule."""

"""Recurrent attention: gated linear attention and the delta rule."""

"""Recurrent attention: gated linear attention and the delta rule, by chunks of tokens."""

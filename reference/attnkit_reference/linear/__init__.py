"""Attention whose weights are products of features, so that sums over keys stand for pairs of tokens."""

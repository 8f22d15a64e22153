"""Attention through few tokens: landmarks, segments, combinations of keys; and normalised products without scores."""

"""Sparsemax, α-entmax, ReLA and SimA."""

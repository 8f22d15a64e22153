"""Seeded inputs of the ops as frozen cases."""
